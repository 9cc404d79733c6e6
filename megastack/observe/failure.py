"""The record that a failing rank leaves before it goes: when, where on the mesh, doing what, and its own traceback.

A launcher sorts these records. A rank whose error only echoes that another one is gone ("connection closed") comes
after those that failed by themselves, and after those that died without writing anything.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megastack.mesh.shape import Axis, describe_coordinates
from megastack.observe.files import replace_text
from megastack.records import RecordError, integer, read_record, string

TRACE_KEPT = 10_000


@dataclass(frozen=True)
class FailureRecord:
    """One rank's account of its failure.

    Attributes:
        rank: the global rank.
        coordinates: its place on the mesh, in words.
        time_ns: unix time.
        step: completed optimizer steps.
        action: what it was doing.
        error: class and message.
        trace: its traceback.
        message: the message alone.
        echo: the error says no more than that another rank is gone.
        refused: nothing was trained yet, and the error is the user's to mend.
        blames: other ranks that the error is about.
    """

    rank: int
    coordinates: str
    time_ns: int
    step: int
    action: str
    error: str
    trace: str
    message: str
    echo: bool = False
    refused: bool = False
    blames: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        error: BaseException,
        rank: int,
        coordinates: Mapping[Axis, int],
        *,
        step: int,
        action: str,
        echo: bool = False,
        refused: bool = False,
    ) -> FailureRecord:
        """The account of ``error``, now."""
        return cls(
            rank=rank,
            coordinates=describe_coordinates(coordinates),
            time_ns=time.time_ns(),
            step=step,
            action=action,
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            message=str(error),
            echo=echo,
            refused=refused,
            blames=[other for other in getattr(error, "ranks", ()) if other != rank],
        )

    @classmethod
    def read(cls, path: Path) -> FailureRecord | None:
        """The record in a file; ``None`` where there is none to be read."""
        try:
            record = read_record(path)
            for name in ("rank", "time_ns", "step"):
                integer(record, name)
            for name in ("coordinates", "action", "error", "trace", "message"):
                string(record, name)
            return cls(**record)
        except (OSError, RecordError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the record; readers see all of it or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(self), indent=1) + "\n")

    def shortened(self) -> FailureRecord:
        """The record for a pipe, which must not fill up: of a long traceback only the end."""
        return replace(
            self, trace=self.trace[-TRACE_KEPT:], error=self.error[-TRACE_KEPT:], message=self.message[-TRACE_KEPT:]
        )

    def summary(self) -> str:
        """The account in one line (or as many as the error has)."""
        return f"[rank {self.rank} | {self.coordinates}] failed in {self.action}: {self.error}"

    def describe(self) -> str:
        """The account for a person, its traceback first, so that the last lines say who, where and what."""
        return f"{self.trace.rstrip()}\n{self.summary()}"


def read_failures(folder: Path) -> list[FailureRecord]:
    """The records in a folder, in order of importance (:func:`by_cause`)."""
    found = [FailureRecord.read(path) for path in folder.glob("rank_*.json")]
    return by_cause(record for record in found if record is not None)


def any_failed(folder: Path) -> bool:
    """Whether a rank has left a record in a folder."""
    return any(folder.glob("rank_*"))


def by_cause(records: Iterable[FailureRecord]) -> list[FailureRecord]:
    """Ranks that failed by themselves first, the earliest first."""
    return sorted(records, key=lambda record: (record.echo, record.time_ns))


def silent_ranks(records: Sequence[FailureRecord], world_size: int) -> list[int]:
    """The ranks that ended without a word, where no rank gave a cause of its own; else none."""
    if any(not record.echo for record in records):
        return []
    heard = {record.rank for record in records}
    return [rank for rank in range(world_size) if rank not in heard]
