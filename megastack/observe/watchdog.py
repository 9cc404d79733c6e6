"""When a rank waits in vain: every rank writes down where it stands, and the accounts together name who is missing.

A :class:`Watchdog` writes the :class:`RankState` of its rank from a thread of its own: when nothing has moved for most
of the time-out, and when this rank or another one fails. The reports of all ranks are therefore complete when the first
wait times out. A stopped process writes none. :func:`find_missing_ranks` compares the reports: operations have the same
numbers on all ranks, so the reports show which rank did not arrive at an operation and which ranks wait for it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from megastack.comm.flight_recorder import FlightRecorder, Operation
from megastack.mesh.shape import Axis, describe_coordinates
from megastack.observe.files import replace_text
from megastack.records import RecordError, integer, integers, mapping, number, read_record, sequence, string

MOST_OF_IT = 0.9
"""A wait that has taken this part of the time-out counts as one that will end by it."""
LOOKS = 20
"""How often the thread looks within the time-out, at least once a second."""
ASKS_AFTER_S = 5.0
"""After so long without a move it asks whether others have failed, or after one look of a short time-out."""
FRAMES = 12
JOINING = ("world", "join")
"""Axis and kind of what comes before every operation: the ranks find each other and open their groups."""


@dataclass(frozen=True)
class RankState:
    """Where one rank stands.

    Attributes:
        rank: the global rank.
        coordinates: its place on the mesh, in words.
        time_ns: unix time.
        doing: step, action and layer.
        seconds: since the operation that it waits for began, or else since it last started or got anything.
        waiting: the operation that it waits for, if any.
        last: the operation that it started last, if any.
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
    last: Operation | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> RankState:
        """The inverse of ``dataclasses.asdict``, after a journey as JSON.

        Raises:
            RecordError: it is not such a record.
        """
        counts = mapping(record, "counts")
        return cls(
            rank=integer(record, "rank"),
            coordinates=string(record, "coordinates"),
            time_ns=integer(record, "time_ns"),
            doing=string(record, "doing"),
            seconds=number(record, "seconds"),
            waiting=_operation(record, "waiting"),
            last=_operation(record, "last"),
            counts={line: integer(counts, line) for line in counts},
            **{name: [str(each) for each in sequence(record, name)] for name in ("operations", "actions", "stack")},
        )

    @property
    def began_s(self) -> float:
        """When it began to wait, or last moved; unix seconds."""
        return self.time_ns / 1e9 - self.seconds

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


def _operation(record: Mapping[str, Any], name: str) -> Operation | None:
    """An operation of a record, which may be null.

    Raises:
        RecordError: it is something else.
    """
    if record.get(name) is None:
        return None
    parts = dict(zip(Operation._fields, sequence(record, name), strict=False))
    return Operation(
        string(parts, "axis"),
        string(parts, "op"),
        integer(parts, "number"),
        integers(parts, "shape"),
        integers(parts, "ranks"),
    )


class Watchdog:
    """Watches one rank; a context around its work.

    Args:
        trail: of the rank's mesh.
        path: where its report goes.
        rank: the global rank.
        coordinates: its place on the mesh.
        limit_s: how long nothing may move.
        doing: what the rank is busy with, in words.
        may_write: whether its run still has the folder.
        failed: whether another rank has failed; asked only while nothing moves here.
    """

    def __init__(
        self,
        flight_recorder: FlightRecorder,
        path: Path,
        rank: int,
        coordinates: Mapping[Axis, int],
        *,
        limit_s: float,
        doing: Callable[[], str],
        may_write: Callable[[], bool] = lambda: True,
        failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._trail, self._path, self._doing, self._limit_s, self._failed = (
            flight_recorder,
            path,
            doing,
            limit_s,
            failed,
        )
        self._rank, self._coordinates = rank, describe_coordinates(coordinates)
        self._may_write = may_write
        self._over = threading.Event()
        self._written: float | None = None  # the trail's last move then
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
        """Write the report, unless the one that is there still holds."""
        moved = self._trail.moved
        if self._holds(moved) or not self._may_write():
            return
        self._written = moved
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(asdict(self.report()), indent=1) + "\n")
        except OSError:
            pass  # a full disk; the failure itself is told in other ways

    def _holds(self, moved: float) -> bool:
        """Whether a report was written and nothing has moved since, or only after others had failed.

        What was true when the time was over tells more than what this rank came upon when it was late.
        """
        return self._written is not None and (self._written == moved or self._failed())

    def report(self) -> RankState:
        """Where the rank stands now."""
        flight_recorder = self._trail
        return RankState(
            rank=self._rank,
            coordinates=self._coordinates,
            time_ns=time.time_ns(),
            doing=self._doing(),
            seconds=time.monotonic()
            - (flight_recorder.moved if flight_recorder.waiting is None else flight_recorder.since),
            waiting=flight_recorder.waiting,
            counts=flight_recorder.counts(),
            operations=[str(operation) for operation in list(flight_recorder.operations)],
            actions=[str(action) for action in list(flight_recorder.actions)],
            stack=_stack(self._main),
            last=flight_recorder.operations[-1] if flight_recorder.operations else None,
        )

    def _watch(self) -> None:
        pause = min(1.0, self._limit_s / LOOKS)
        asks_after_s = min(ASKS_AFTER_S, self._limit_s / LOOKS)
        while not self._over.wait(pause):
            moved = self._trail.moved
            idle = time.monotonic() - moved
            if self._written is not None and not self._holds(moved):
                self._path.unlink(missing_ok=True)  # it has gone on, and so have the others
                self._written = None
            if idle >= MOST_OF_IT * self._limit_s or (idle >= asks_after_s and self._failed()):
                self.write()


def _stack(thread: int) -> list[str]:
    """Where another thread is; of a thread that fails and asks for itself, its own account tells more."""
    if thread == threading.get_ident():
        return []
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    return [f"{found.filename}:{found.lineno} in {found.name}" for found in frames]


def read_reports(folder: Path) -> list[RankState]:
    """The reports in a folder, by rank; a file that is not a report is passed over."""
    found = []
    for path in sorted(folder.glob("rank_*.json")):
        with contextlib.suppress(OSError, RecordError):
            found.append(RankState.from_record(read_record(path)))
    return found


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


def find_missing_ranks(reports: Sequence[RankState], world_size: int) -> Missing | None:
    """Find who is missing, from the reports of all ranks that could write one.

    Where no rank waits on the host, as with NCCL, the operations started last take the place of those waited for.

    Returns:
        ``None`` where nobody waits, or where ranks wait for each other in a circle.
    """
    if not any(report.waiting for report in reports):
        return _missing([replace(report, waiting=report.last) for report in reports], world_size)
    return _missing(reports, world_size) or _latecomer(reports)


def _missing(reports: Sequence[RankState], world_size: int) -> Missing | None:
    """The rank at which the waits end."""
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


def _absent(report: RankState, by_rank: Mapping[int, RankState]) -> set[int]:
    """The ranks that did not start the operation that one waits for."""
    operation = report.waiting
    if operation is None:
        return set()
    others = set(operation.ranks) - {report.rank}
    line = operation.other.channel
    return {rank for rank in others if rank not in by_rank or by_rank[rank].counts.get(line, 0) < operation.number}


def _latecomer(reports: Sequence[RankState]) -> Missing | None:
    """The last to come to an operation that all have started, after those who waited for it had given up."""
    arrived = defaultdict[tuple[frozenset[str], int], list[RankState]](list)
    for report in sorted(reports, key=lambda report: report.began_s):
        if report.waiting is not None:
            lines = frozenset((report.waiting.channel, report.waiting.other.channel))
            arrived[lines, report.waiting.number].append(report)
    if not arrived:
        return None
    group = max(arrived.values(), key=lambda group: group[-1].began_s - group[0].began_s)
    last, gap_s = group[-1], group[-1].began_s - group[0].began_s
    if gap_s <= 0:
        return None
    operation = None if last.waiting is None or last.waiting[:2] == JOINING else str(last.waiting)
    return Missing(last.rank, operation, gap_s, tuple(report.describe() for report in group[:-1]))
