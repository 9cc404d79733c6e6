"""When a rank waits in vain: every rank writes down where it stands, and the accounts together name who is missing.

A :class:`Watchdog` writes this rank's :class:`Report` when nothing has moved for the time-out, from a thread of its
own, or when the rank fails. A stopped process writes nothing, which tells as much. :func:`diagnose` puts the reports
together: operations are numbered alike on all ranks, so it can be seen who did not arrive at one, and who waits.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megastack.comm.trail import Operation, Trail
from megastack.mesh.shape import Axis, describe_coordinates
from megastack.observe.files import read_record, replace_text

LOOKS = 10
"""How often the thread looks within the time-out, at most once a second."""
RECOVERED_S = 10.0
"""A rank that has gone on for this long takes back what it wrote."""
FRAMES = 12
JOINING = ("world", "join")
"""Axis and kind of what comes before every operation: the ranks find each other and open their groups."""


@dataclass(frozen=True)
class Report:
    """Where one rank stands.

    Attributes:
        rank: the global rank.
        coordinates: its place on the mesh, in words.
        time_ns: unix time.
        doing: step, action and layer.
        seconds: since it last started or got anything.
        waiting: the operation that it waits for, if any.
        counts: how many operations it has started, by line.
        operations: the last ones in words, the newest last.
        actions: likewise, of the pipeline.
        stack: where its main thread is, the innermost call last.
    """

    rank: int
    coordinates: str
    time_ns: int
    doing: str
    seconds: float
    waiting: Operation | None
    counts: dict[str, int]
    operations: list[str]
    actions: list[str]
    stack: list[str]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Report:
        """The inverse of ``dataclasses.asdict``, after a journey as JSON."""
        waiting = record["waiting"]
        if waiting is not None:
            axis, op, number, shape, ranks = waiting
            waiting = Operation(axis, op, number, tuple(shape), tuple(ranks))
        return cls(**{**record, "waiting": waiting})

    @property
    def who(self) -> str:
        """The rank as logs name it."""
        return f"[rank {self.rank} | {self.coordinates}]"

    def describe(self) -> str:
        """The report in one line."""
        if self.waiting is not None and self.waiting[:2] == JOINING:
            return f"{self.who} waits for all ranks to join"
        if self.waiting is not None:
            return f"{self.who} waits for {self.waiting} in {self.doing}"
        where = f", at {self.stack[-1]}" if self.stack else ""
        return f"{self.who} called nothing for {self.seconds:.0f} s in {self.doing}{where}"


class Watchdog:
    """Watches one rank; a context around its work.

    Args:
        trail: of the rank's mesh.
        path: where its report goes.
        rank: the global rank.
        coordinates: its place on the mesh.
        limit_s: how long nothing may move.
        doing: what the rank is busy with, in words.
    """

    def __init__(
        self,
        trail: Trail,
        path: Path,
        rank: int,
        coordinates: Mapping[Axis, int],
        *,
        limit_s: float,
        doing: Callable[[], str],
    ) -> None:
        self._trail, self._path, self._doing, self._limit_s = trail, path, doing, limit_s
        self._rank, self._coordinates = rank, describe_coordinates(coordinates)
        self._over = threading.Event()
        self._written: float | None = None
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is not None:
            self.write()

    def write(self) -> None:
        """Write the report, unless one is there: what was true when the time was over tells more."""
        if self._written is not None:
            return
        self._written = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(asdict(self.report()), indent=1) + "\n")
        except OSError:
            pass  # a full disk; the failure itself is told in other ways

    def report(self) -> Report:
        """Where the rank stands now."""
        trail = self._trail
        return Report(
            rank=self._rank,
            coordinates=self._coordinates,
            time_ns=time.time_ns(),
            doing=self._doing(),
            seconds=time.monotonic() - trail.moved,
            waiting=trail.waiting,
            counts=trail.counts(),
            operations=[str(operation) for operation in list(trail.operations)],
            actions=[str(action) for action in list(trail.actions)],
            stack=_stack(self._main),
        )

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._limit_s / LOOKS)):
            if time.monotonic() - self._trail.moved >= self._limit_s:
                self.write()
            elif self._written is not None and time.monotonic() - self._written > self._limit_s + RECOVERED_S:
                self._path.unlink(missing_ok=True)
                self._written = None


def _stack(thread: int) -> list[str]:
    """Where another thread is; of a thread that fails and asks for itself, its own account tells more."""
    if thread == threading.get_ident():
        return []
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    return [f"{found.filename}:{found.lineno} in {found.name}" for found in frames]


def read_reports(folder: Path) -> list[Report]:
    """The reports in a folder, by rank; what cannot be read is passed over."""
    found = (read_record(path) for path in sorted(folder.glob("rank_*.json")))
    return [Report.from_record(record) for record in found if record is not None]


@dataclass(frozen=True)
class Missing:
    """Who did not come.

    Attributes:
        rank: one that others wait for and that waits for nobody; the first of them.
        operation: the first that it did not arrive at; None for a rank that did not even join.
        waited_s: how long the longest wait was.
        lines: every rank that waits, and what missing ranks were doing where they could say so.
    """

    rank: int
    operation: str | None
    waited_s: float
    lines: tuple[str, ...]


def diagnose(reports: Sequence[Report], world_size: int) -> Missing | None:
    """Find who is missing, from the reports of all ranks that could write one.

    Returns:
        ``None`` where nobody waits, or where ranks wait for each other in a circle.
    """
    by_rank = {report.rank: report for report in reports}
    absent = {report.rank: _absent(report, by_rank) for report in reports}
    waiting = [report for report in reports if absent[report.rank]]
    roots = [
        rank
        for rank in range(world_size)
        if not absent.get(rank) and any(rank in absent[report.rank] for report in waiting)
    ]
    if not roots:
        return None
    first = min(roots, key=lambda rank: (rank in by_rank, -by_rank[rank].seconds if rank in by_rank else 0.0, rank))
    wanted = next(report.waiting for report in waiting if report.waiting and first in absent[report.rank])
    told = [by_rank[rank].describe() for rank in roots if rank in by_rank]
    lines = (*(report.describe() for report in waiting), *told)
    operation = None if wanted[:2] == JOINING else str(wanted.other)
    return Missing(first, operation, max(report.seconds for report in waiting), lines)


def _absent(report: Report, by_rank: Mapping[int, Report]) -> set[int]:
    """The ranks that did not start the operation that one waits for."""
    operation = report.waiting
    if operation is None:
        return set()
    others = set(operation.ranks) - {report.rank}
    line = operation.other.line
    return {rank for rank in others if rank not in by_rank or by_rank[rank].counts.get(line, 0) < operation.number}
