"""The record that a failing rank leaves before it goes: when, where on the mesh, doing what, and its own traceback.

A launcher sorts these records by time. That is how the first failure is told from the "connection closed" of its peers.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megastack.mesh.shape import Axis, describe_coordinates


@dataclass(frozen=True)
class FailureRecord:
    """One rank's account of its failure; ``time_ns`` is unix time."""

    rank: int
    coordinates: str
    time_ns: int
    step: int
    action: str
    error: str
    trace: str

    def describe(self) -> str:
        """The account for a person, the traceback included."""
        return f"{self.trace.rstrip()}\n[rank {self.rank} | {self.coordinates}] failed in {self.action}: {self.error}"


def write_failure(
    path: Path, error: BaseException, rank: int, coordinates: Mapping[Axis, int], step: int, action: str
) -> FailureRecord:
    """Write the record of ``error``, which is being handled."""
    text = f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    record = FailureRecord(rank, describe_coordinates(coordinates), time.time_ns(), step, action, text, trace)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record), indent=1))
    return record


def first_failure(folder: Path) -> FailureRecord | None:
    """The earliest record in a folder of records, if there is any."""
    records = [FailureRecord(**json.loads(path.read_text())) for path in folder.glob("rank_*.json")]
    return min(records, key=lambda record: record.time_ns, default=None)
