"""Which failure ended a run: the accounts that ranks left, where they stood, and what their launcher saw."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from megastack.mesh.shape import MeshShape, describe_coordinates
from megastack.observe.failure import FailureRecord, silent_ranks
from megastack.observe.watchdog import TIMEOUT_FRACTION, MissingRank, RankState, find_missing_ranks


@dataclass(frozen=True)
class Account:
    """The failure that ended a run."""

    rank: int
    coordinates: str
    reason: str
    text: str
    step: int = 0
    refused: bool = False


@dataclass(frozen=True)
class Seen:
    """What the launcher saw.

    Attributes:
        first: the rank that ended first in its eyes.
        exit_codes: how ranks ended, as far as that is known; negative for a signal.
        killed: why it killed the ranks, if it did.
        outlasted: the ranks that it killed because they outlasted a failure.
    """

    first: int
    exit_codes: Mapping[int, int]
    killed: str | None = None
    outlasted: Collection[int] = ()


def account_of(
    records: Sequence[FailureRecord], reports: Sequence[RankState], seen: Seen, shape: MeshShape, timeout_s: float
) -> Account:
    """The failure to report.

    It is, in this order: the first rank that failed by itself; a rank that others waited for until the time-out; one
    that the error of another is about; one that ended without a record; the first with a secondary failure.
    """
    if records and not records[0].echo:
        return _of_record(records[0])
    missing = find_missing_ranks(reports, shape.world_size)
    silent = silent_ranks(records, shape.world_size)
    named = next(((rank, record.message) for record in records for rank in record.blames if rank in silent), None)
    if missing is not None and missing.waited_s >= TIMEOUT_FRACTION * timeout_s:
        named = missing.rank, _how_it_was_missed(missing, timeout_s)
    if named is None:
        timed_out = any(report.seconds >= TIMEOUT_FRACTION * timeout_s for report in reports)
        candidates = _without_record(silent, seen, any_record=bool(records), timed_out=timed_out)
        preferred = [seen.first, *([missing.rank] if missing is not None else []), *candidates]
        named = next(((rank, _how_it_died(rank, seen)) for rank in preferred if rank in candidates), None)
    if named is None:
        return _of_record(records[0])
    rank, reason = named
    coordinates = describe_coordinates(shape.coordinates(rank))
    its_own = tuple(report.describe() for report in reports if report.rank == rank)
    lines = [*(missing.lines if missing is not None else its_own), f"[rank {rank} | {coordinates}] {reason}"]
    return Account(rank, coordinates, reason, "\n".join(lines), max((record.step for record in records), default=0))


def _of_record(record: FailureRecord) -> Account:
    reason = record.message if record.refused else record.error
    return Account(record.rank, record.coordinates, reason, record.describe(), record.step, record.refused)


def _without_record(silent: Sequence[int], seen: Seen, *, any_record: bool, timed_out: bool) -> Sequence[int]:
    """The ranks without a record that may have caused the failure.

    After a time-out a rank that outlasted it did not respond, and a rank that aborted may be a victim: NCCL aborts
    ranks that wait too long. Without a time-out a rank that outlasts the failure may simply wait, as with NCCL.
    """
    ended = [rank for rank in silent if rank not in seen.outlasted]
    outlasted = [rank for rank in silent if rank in seen.outlasted]
    if timed_out:
        return [rank for rank in ended if seen.exit_codes.get(rank) != -signal.SIGABRT] or outlasted or ended
    return ended or ([] if any_record else outlasted)


def _how_it_was_missed(late: MissingRank, timeout_s: float) -> str:
    what = "join" if late.operation is None else f"arrive at {late.operation}"
    return f"did not {what} within launch.timeout_s={timeout_s:g}"


def _how_it_died(rank: int, seen: Seen) -> str:
    if seen.killed is not None:
        return seen.killed
    if rank in seen.outlasted:
        return "did not end within launch.grace_s, and was killed"
    if seen.exit_codes.get(rank):
        return f"ended by {_cause(seen.exit_codes[rank])}"
    return "ended without a traceback, as when it is killed or out of memory"


def _cause(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
