"""``metrics.jsonl`` and TensorBoard: one writer, one row a line, floats by ``repr`` so that they read back exactly.

A row never holds a made-up number: what was not measured is null, and so is what is not finite. After a resume, rows
beyond the resumed step are superseded; :func:`read_metrics` keeps the last row of each step.
"""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "consumed_tokens": "train/consumed_tokens",
    "step_time_s": "perf/step_time_s",
    "tokens_per_s": "perf/tokens_per_s",
    "tokens_per_s_per_device": "perf/tokens_per_s_per_device",
    "mfu": "perf/mfu",
    "bubble": "perf/bubble",
    "step_bubble": "perf/step_bubble",
    "peak_memory_bytes": "mem/peak_bytes",
}
"""TensorBoard's tag of each scalar of a training row."""


def tensorboard_installed() -> bool:
    """Whether ``tensorboard`` can be imported."""
    return importlib.util.find_spec("tensorboard") is not None


class MetricsWriter:
    """Writes the rows of one run; made on one rank only.

    Args:
        path: ``metrics.jsonl``; rows are appended.
        tensorboard: whether to write TensorBoard events beside it.
    """

    def __init__(self, path: Path, *, tensorboard: bool) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(path.parent / "tensorboard"))

    def train(self, step: int, **fields: Any) -> dict[str, Any]:
        """A training row; returns it as written."""
        row = self._write("train", step, fields)
        self._scalars(step, {TAGS[name]: value for name, value in row.items() if name in TAGS})
        self._scalars(step, {f"comm/{axis}/wire_bytes": value for axis, value in row.get("wire_bytes", {}).items()})
        return row

    def validation(self, step: int, **fields: Any) -> dict[str, Any]:
        """A validation row; returns it as written."""
        row = self._write("validation", step, fields)
        self._scalars(step, {"val/loss": row["loss"]})
        return row

    def event(self, step: int, name: str, **fields: Any) -> dict[str, Any]:
        """An event (``start``, ``resume``, ``checkpoint``, ``preempt``, ``nonfinite``, ``end``) and its fields."""
        return self._write("event", step, {"name": name} | fields)

    def _write(self, kind: str, step: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        row = {"kind": kind, "step": step, "time": time.time()} | {name: _plain(x) for name, x in fields.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        return row

    def _scalars(self, step: int, values: Mapping[str, Any]) -> None:
        if self._events is not None:
            for tag, value in values.items():
                if value is not None:
                    self._events.add_scalar(tag, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def read_metrics(path: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The rows of a kind by ascending step, the last one of each step."""
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == kind:
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]
