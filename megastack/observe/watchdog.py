"""Hang detection: every rank writes a report of its state, and the reports together show which rank is missing.

A :class:`Watchdog` writes the :class:`RankState` of its rank from a separate thread: when the rank has made no progress
for most of the time-out, and when this rank or another one fails. The reports of all ranks are therefore complete when
the first wait times out. A stopped process writes no report. :func:`find_missing_ranks` compares the reports.
Operations have the same numbers on all ranks, so the reports show which rank did not reach an operation and which ranks
wait for it.

With gloo, a wait that times out raises. With NCCL, the host is blocked in a call that does not return until NCCL ends
the process. There the thread also ends the rank, before NCCL does.
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

from megastack.comm.flight_recorder import FlightRecorder, Operation
from megastack.comm.periodic import PeriodicThread
from megastack.mesh.shape import Axis, describe_coordinates
from megastack.observe.files import replace_text
from megastack.records import RecordError, integer, integers, mapping, number, read_record, sequence, string

TIMEOUT_FRACTION = 0.9
"""A wait longer than this fraction of the time-out counts as timed out."""
POLLS_PER_TIMEOUT = 20
"""How often the thread polls within the time-out."""
MOST_PERIOD_S = 0.5
"""The thread polls at least this often."""
BLOCKED_S = 0.2
"""Seconds without progress after which a rank counts as blocked, if another rank has ended."""
CHECK_PEERS_AFTER_S = 5.0
"""Seconds without progress after which the thread checks whether other ranks failed; less for a short time-out."""
FRAMES = 12
JOINING = ("world", "join")
"""Axis and kind of the first operation, the rendezvous in which ranks connect and create their groups."""


@dataclass(frozen=True)
class RankState:
    """The state of one rank.

    Attributes:
        rank: the global rank.
        coordinates: its mesh coordinates, as text.
        time_ns: unix time of the report.
        doing: step, action and layer.
        seconds: time since the awaited operation began, or else since the most recent progress.
        waiting: the awaited operation, if any.
        last: the most recent operation, if any.
        counts: the number of operations issued, by group or channel.
        operations: the most recent operations as text, newest last.
        actions: the most recent pipeline actions, newest last.
        stack: the stack of the main thread, innermost call last.
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
    def from_record(cls, record: Mapping[str, object]) -> RankState:
        """Inverse of ``dataclasses.asdict``, from parsed JSON.

        Raises:
            RecordError: the record is not a valid report.
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
            counts={channel: integer(counts, channel) for channel in counts},
            **{name: [str(each) for each in sequence(record, name)] for name in ("operations", "actions", "stack")},
        )

    @property
    def idle_since_s(self) -> float:
        """When the rank began to wait or last made progress, in unix seconds."""
        return self.time_ns / 1e9 - self.seconds

    @property
    def label(self) -> str:
        """The rank as shown in logs, such as ``[rank 5 | pp1 dp0 tp1]``."""
        return f"[rank {self.rank} | {self.coordinates}]"

    def describe(self) -> str:
        """Return the report in one line."""
        if self.waiting is not None and self.waiting[:2] == JOINING:
            return f"{self.label} waits for all ranks to join"
        if self.waiting is not None:
            return f"{self.label} waits for {self.waiting} in {self.doing}"
        where = f", at {self.stack[-1]}" if self.stack else ""
        return f"{self.label} issued no operation for {self.seconds:.0f} s in {self.doing}{where}"


def _operation(record: Mapping[str, object], name: str) -> Operation | None:
    """Read an operation from a record; None if it is null.

    Raises:
        RecordError: the value is neither an operation nor null.
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
    """A context manager around the work of one rank that reports the rank's state when it hangs or fails.

    Args:
        flight_recorder: the flight recorder of the rank's mesh.
        path: the file of the report.
        rank: the global rank.
        coordinates: its mesh coordinates.
        limit_s: the time-out.
        doing: describes what the rank is doing.
        may_write: whether the run still owns its folder.
        failed: whether another rank has failed, as the files of all ranks show; called only while this rank makes no
            progress.
        lost: whether another rank is known to have ended.
        end: ends a rank that is blocked although the time-out has passed, or although another rank has failed. Called
            on the thread with the report, and only if :attr:`ends_rank` is set.

    Attributes:
        ends_rank: whether the thread must end a blocked rank, because no wait raises.
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
        lost: Callable[[], bool] = lambda: False,
        end: Callable[[RankState], object] = lambda state: None,
    ) -> None:
        self._recorder, self._path, self._limit_s = flight_recorder, path, limit_s
        self._rank, self._coordinates = rank, describe_coordinates(coordinates)
        self._doing, self._may_write, self._failed, self._lost, self._end = doing, may_write, failed, lost, end
        self.ends_rank = False
        self._awaited: Operation | None = None
        self._awaited_at = 0.0  # when the thread first saw that a rank with `ends_rank` was blocked on it
        self._reported: float | None = None  # the time of the most recent progress when the report was written
        self._main = threading.get_ident()
        self._thread = PeriodicThread("watchdog", min(MOST_PERIOD_S, limit_s / POLLS_PER_TIMEOUT), self._poll)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop()
        if error is not None:
            self.write()

    def write(self) -> None:
        """Write the report, unless the existing one is still valid."""
        moved = self._moved()
        if self._is_valid(moved) or not self._may_write():
            return
        self._reported = moved
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(asdict(self.report()), indent=1) + "\n")
        except OSError:
            pass  # for example a full disk; the failure itself is reported elsewhere

    def _is_valid(self, moved: float) -> bool:
        """Whether a report exists and the rank has made no progress since, or only after others had failed.

        The state at the time-out is more informative than the actions of a late rank after the others had failed.
        """
        return self._reported is not None and (self._reported == moved or self._lost() or self._failed())

    def report(self) -> RankState:
        """Return the current state of the rank."""
        recorder = self._recorder
        waiting, idle_since = self._find_awaited()
        return RankState(
            rank=self._rank,
            coordinates=self._coordinates,
            time_ns=time.time_ns(),
            doing=self._doing(),
            seconds=time.monotonic() - idle_since,
            waiting=waiting,
            counts=recorder.counts(),
            operations=[str(operation) for operation in list(recorder.operations)],
            actions=[str(action) for action in list(recorder.actions)],
            stack=_stack(self._main),
            last=recorder.operations[-1] if recorder.operations else None,
        )

    def _find_awaited(self) -> tuple[Operation | None, float]:
        """Return the operation that the rank is blocked on, and since when."""
        try:
            return self._recorder.awaited()
        except RuntimeError:  # the device has failed, which the main thread reports
            return None, self._recorder.moved

    def _moved(self) -> float:
        """Return when the rank last made progress: its device if that is blocked, else the host.

        A host that continues while its device is blocked makes no progress.
        """
        return self._recorder.moved if self._awaited is None else self._awaited_at

    def _poll(self) -> None:
        awaited, _ = self._find_awaited()
        if self.ends_rank and awaited is not self._awaited:
            self._awaited, self._awaited_at = awaited, time.monotonic()
        moved = self._moved()
        idle_s = time.monotonic() - moved
        if self._reported is not None and not self._is_valid(moved):
            self._path.unlink(missing_ok=True)  # the rank and its peers have continued
            self._reported = None
        check_peers_after_s = min(CHECK_PEERS_AFTER_S, self._limit_s / POLLS_PER_TIMEOUT)
        peer_lost = awaited is not None and idle_s >= BLOCKED_S and self._lost()
        peer_failed = peer_lost or (idle_s >= check_peers_after_s and self._failed())
        if idle_s >= TIMEOUT_FRACTION * self._limit_s or peer_failed:
            self.write()
        if self.ends_rank and awaited is not None and (idle_s >= self._limit_s or peer_failed):
            self._end(self.report())


def _stack(thread: int) -> list[str]:
    """Return the stack of another thread; empty for the calling thread, whose failure report has a traceback."""
    if thread == threading.get_ident():
        return []
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
    return [f"{found.filename}:{found.lineno} in {found.name}" for found in frames]


def read_reports(folder: Path) -> list[RankState]:
    """Read the reports in a folder, by rank; files that are not valid reports are skipped."""
    found = []
    for path in sorted(folder.glob("rank_*.json")):
        with contextlib.suppress(OSError, RecordError):
            found.append(RankState.from_record(read_record(path)))
    return found


@dataclass(frozen=True)
class MissingRank:
    """A rank that others wait for.

    Attributes:
        rank: the first rank that others wait for and that is not itself waiting.
        operation: the first operation that it did not reach; None for a rank that did not join.
        waited_s: the longest wait.
        lines: a line for every waiting rank, and for every missing rank that could write a report.
    """

    rank: int
    operation: str | None
    waited_s: float
    lines: tuple[str, ...]


def find_missing_ranks(reports: Sequence[RankState], world_size: int) -> MissingRank | None:
    """Find the rank that others wait for, from the reports of all ranks that could write one.

    If no rank waits for an operation, the most recent operations are used as the awaited ones. If these do not show a
    missing rank either, it is the rank that has started fewer operations than its peers.

    Returns:
        ``None`` if no rank waits, or if ranks wait for each other in a cycle.
    """
    if any(report.waiting for report in reports):
        return _missing(reports, world_size) or _straggler(reports)
    return _missing([replace(report, waiting=report.last) for report in reports], world_size) or _behind(reports)


def _missing(reports: Sequence[RankState], world_size: int) -> MissingRank | None:
    """Return the rank at the end of the chain of waits."""
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
    awaited = _first_awaited([report for report in waiting if first in absent[report.rank]])
    missing = (by_rank[rank] for rank in roots if rank in by_rank)
    lines = tuple(report.describe() for report in (*waiting, *missing))
    operation = None if awaited[:2] == JOINING else str(awaited.other)
    return MissingRank(first, operation, max(report.seconds for report in waiting), lines)


def _first_awaited(reports: Sequence[RankState]) -> Operation:
    """Return the first operation that ranks wait for, on the group or channel of the longest wait.

    Hosts that do not block in a wait, and sources of broadcasts, are several operations apart.
    """
    longest = max(reports, key=lambda report: report.seconds).waiting
    awaited = [report.waiting for report in reports if report.waiting is not None]
    assert longest is not None, "called with ranks that wait"
    return min((found for found in awaited if found.channel == longest.channel), key=lambda found: found.number)


def _absent(report: RankState, by_rank: Mapping[int, RankState]) -> set[int]:
    """Return the ranks that did not start the operation for which a rank waits."""
    operation = report.waiting
    if operation is None:
        return set()
    others = set(operation.ranks) - {report.rank}
    channel = operation.other.channel
    return {rank for rank in others if rank not in by_rank or by_rank[rank].counts.get(channel, 0) < operation.number}


def _straggler(reports: Sequence[RankState]) -> MissingRank | None:
    """Return the last rank to start an operation that all ranks started, if the others had timed out by then."""
    arrived = defaultdict[tuple[frozenset[str], int], list[RankState]](list)
    for report in sorted(reports, key=lambda report: report.idle_since_s):
        if report.waiting is not None:
            lines = frozenset((report.waiting.channel, report.waiting.other.channel))
            arrived[lines, report.waiting.number].append(report)
    if not arrived:
        return None
    group = max(arrived.values(), key=lambda group: group[-1].idle_since_s - group[0].idle_since_s)
    last, gap_s = group[-1], group[-1].idle_since_s - group[0].idle_since_s
    if gap_s <= 0:
        return None
    operation = None if last.waiting is None or last.waiting[:2] == JOINING else str(last.waiting)
    return MissingRank(last.rank, operation, gap_s, tuple(report.describe() for report in group[:-1]))


def _behind(reports: Sequence[RankState]) -> MissingRank | None:
    """Return a rank that has started fewer operations of a group or channel than its peers, and is ahead of none."""
    ahead, missed = set[int](), dict[int, tuple[int, str]]()
    for channel, counts in _counts_by_channel(reports).items():
        least, most = min(counts.values()), max(counts.values())
        ahead |= {rank for rank, count in counts.items() if count > least}
        for rank, count in counts.items():
            if count < most:
                missed[rank] = max(missed.get(rank, (0, "")), (most - count, f"operation {count + 1} of {channel}"))
    roots = [rank for rank in missed if rank not in ahead]
    if not roots:
        return None
    first = max(roots, key=lambda rank: missed[rank])
    waiting = [report for report in reports if report.rank in ahead]
    lines = tuple(report.describe() for report in (*waiting, *(found for found in reports if found.rank == first)))
    return MissingRank(first, missed[first][1], max(report.seconds for report in waiting), lines)


def _counts_by_channel(reports: Sequence[RankState]) -> dict[str, dict[int, int]]:
    """Return the number of operations that the ranks started, by group or by (axis, source, destination)."""
    found = defaultdict[str, dict[int, int]](dict)
    ranks = {report.rank for report in reports}
    for report in reports:
        for channel, count in report.counts.items():
            axis, *message, ends = channel.split(" ")
            if message:
                for end in map(int, ends.split(">")):
                    if end in ranks:
                        found[f"{axis} {ends}"].setdefault(end, 0)
            found[f"{axis} {ends}"][report.rank] = count
    return found
