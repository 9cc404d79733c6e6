"""``metrics.jsonl`` and TensorBoard: one writer, one row per line, floats as ``repr`` so that they round-trip exactly.

Values that were not measured or are not finite are null. After a resume, rows beyond the resumed step are superseded;
:func:`read_metrics` keeps the last row of each step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megastack.observe.files import LineFile, read_records
from megastack.records import RecordError, integer, string

Row = dict[str, Any]

TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "consumed_tokens": "train/consumed_tokens",
    "step_time_s": "perf/step_time_s",
    "tokens_per_s": "perf/tokens_per_s",
    "tokens_per_s_per_device": "perf/tokens_per_s_per_device",
    "model_tflops_per_device": "perf/model_tflops_per_device",
    "mfu": "perf/mfu",
    "bubble": "perf/bubble",
    "step_bubble": "perf/step_bubble",
    "peak_memory_bytes": "mem/peak_bytes",
    "peak_reserved_bytes": "mem/peak_reserved_bytes",
}
"""The TensorBoard tag of each scalar of a training row."""


def tensorboard_installed() -> bool:
    """Whether ``tensorboard`` is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def row(kind: str, step: int, fields: Mapping[str, object]) -> Row:
    """Create a row of ``metrics.jsonl`` with the current time, and null for values that are not finite."""
    return {"kind": kind, "step": step, "time": time.time()} | {name: _plain(value) for name, value in fields.items()}


class MetricsWriter:
    """Writes the rows of a run, on one rank.

    Args:
        path: ``metrics.jsonl``; rows are appended.
        tensorboard: whether to write TensorBoard events as well.
    """

    def __init__(self, path: Path, *, tensorboard: bool) -> None:
        self._file = LineFile(path)
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(path.parent / "tensorboard"))

    def write(self, entry: Row) -> None:
        """Append a row, and its scalars to TensorBoard.

        Raises:
            OSError: the row cannot be written; the file is unchanged.
        """
        self._file.append(json.dumps(entry, allow_nan=False))
        if self._events is not None:
            for tag, value in scalars(entry).items():
                self._events.add_scalar(tag, value, entry["step"])

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def scalars(entry: Row) -> dict[str, float]:
    """Return the TensorBoard scalars of a row by tag; the x axis is the optimizer step."""
    if entry["kind"] == "validation":
        found = {"val/loss": entry["loss"]}
    else:
        found = {TAGS[name]: value for name, value in entry.items() if name in TAGS}
        found |= {f"comm/{axis}/wire_bytes": value for axis, value in entry.get("wire_bytes", {}).items()}
        found |= {f"comm/{axis}/exposed_s": value for axis, value in (entry.get("exposed_s") or {}).items()}
    return {tag: value for tag, value in found.items() if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


def read_metrics(path: Path, kind: str = "train") -> list[Row]:
    """Read the last row of each step for one kind, by ascending step; lines that are not valid rows are skipped."""
    rows: dict[int, Row] = {}
    for found in read_records(path):
        with contextlib.suppress(RecordError):
            if string(found, "kind") == kind:
                rows[integer(found, "step")] = found
    return [rows[step] for step in sorted(rows)]
