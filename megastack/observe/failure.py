"""Failure reports, which a failing rank writes before it exits: time, mesh coordinates, action and traceback.

The launcher sorts the reports. A secondary (peer) failure is an error that only reports that another rank is gone
("connection closed"); it comes after primary failures and after ranks that died without a report.
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
    """The failure report of one rank.

    Attributes:
        rank: the global rank.
        coordinates: its mesh coordinates, as text.
        time_ns: unix time.
        step: completed optimizer steps.
        action: what the rank was doing.
        error: class and message.
        trace: the traceback.
        message: the message without the class.
        echo: whether it is a secondary failure, which only reports that another rank is gone.
        refused: whether the configuration is rejected.
        blames: other ranks that the error is about.
        explained: whether the error explains itself, so that its traceback is not printed.
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
    explained: bool = False

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
        explained: bool = False,
    ) -> FailureRecord:
        """Create the report of ``error``, with the current time."""
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
            explained=explained,
        )

    @classmethod
    def read(cls, path: Path) -> FailureRecord | None:
        """Read the report in a file; ``None`` if it is missing or invalid."""
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
        """Write the report atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(self), indent=1) + "\n")

    def shortened(self) -> FailureRecord:
        """Return the report with long texts cut to their end, so that it fits into a pipe."""
        return replace(
            self, trace=self.trace[-TRACE_KEPT:], error=self.error[-TRACE_KEPT:], message=self.message[-TRACE_KEPT:]
        )

    def summary(self) -> str:
        """Return the report without its traceback; one line unless the error has several."""
        return f"[rank {self.rank} | {self.coordinates}] failed in {self.action}: {self.error}"

    def describe(self) -> str:
        """Return the traceback and then the summary, so that the last lines name the rank, the action and the error.

        The traceback of an error that explains itself is only in the file of the report.
        """
        return self.summary() if self.explained else f"{self.trace.rstrip()}\n{self.summary()}"


def read_failures(folder: Path) -> list[FailureRecord]:
    """Read the reports in a folder, in the order of :func:`by_cause`."""
    found = [FailureRecord.read(path) for path in folder.glob("rank_*.json")]
    return by_cause(record for record in found if record is not None)


def any_failed(folder: Path) -> bool:
    """Whether a folder contains a report."""
    return any(folder.glob("rank_*"))


def by_cause(records: Iterable[FailureRecord]) -> list[FailureRecord]:
    """Sort reports: primary failures first, then secondary ones, each by time."""
    return sorted(records, key=lambda record: (record.echo, record.time_ns))


def silent_ranks(records: Sequence[FailureRecord], world_size: int) -> list[int]:
    """Return the ranks without a report, if all reports are secondary failures; otherwise none."""
    if any(not record.echo for record in records):
        return []
    reporting = {record.rank for record in records}
    return [rank for rank in range(world_size) if rank not in reporting]
