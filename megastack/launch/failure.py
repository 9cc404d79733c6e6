"""Determine which failure ended a run, from the reports and last states of ranks and the exits the launcher observed.

A rank with a primary failure writes a report. Its peers then fail too, in operations with that rank, and a rank that
was killed writes nothing. :func:`find_failure` finds the first failure; :func:`end_failed_run` records and prints it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megastack.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayerError,
    MegastackError,
    MeshError,
    PlacementError,
    ScheduleError,
)
from megastack.mesh.shape import MeshShape, describe_coordinates
from megastack.observe.console import Console
from megastack.observe.failure import FailureRecord, silent_ranks
from megastack.observe.files import CannotWriteError
from megastack.observe.folder import RunFolder
from megastack.observe.status import update_status
from megastack.observe.watchdog import TIMEOUT_FRACTION, MissingRank, RankState, find_missing_ranks
from megastack.training.state import RunResult

FAILED, REJECTED = 1, 78
"""Exit codes."""
_BY_OTHERS = (0, -signal.SIGABRT, -signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of ranks that NCCL or the agent may have ended."""
USER_ERRORS = (ConfigError, CheckpointError, DataError, PlacementError, MeshError, ScheduleError)
"""Errors that the user can fix; before training starts, they mean that the configuration is rejected."""


def is_user_error(error: BaseException) -> bool:
    """Whether the user can fix an error; a :class:`LayerError` is a failure: the layer was built before launch."""
    return isinstance(error, USER_ERRORS) and not isinstance(error, LayerError)


def rejects_configuration(error: BaseException, *, before_training: bool) -> bool:
    """Whether an error of a rank rejects the configuration: a :class:`ConfigError` at any time, others only before."""
    return is_user_error(error) and (before_training or isinstance(error, ConfigError))


def explains_itself(error: BaseException) -> bool:
    """Whether the message of an error is enough without its traceback."""
    return is_user_error(error) or isinstance(error, CannotWriteError)


def is_about_other_ranks(error: BaseException, rank: int) -> bool:
    """Whether an error is about other ranks, which raise it as well."""
    return isinstance(error, MegastackError) and bool(error.ranks) and rank not in error.ranks


@dataclass(frozen=True)
class Failure:
    """The failure that ended a run.

    Attributes:
        rank: the rank that failed first.
        coordinates: its mesh coordinates, in words.
        reason: the error, or how the rank ended.
        text: the text to print.
        step: completed optimizer steps.
        rejected: whether the configuration is rejected.
    """

    rank: int
    coordinates: str
    reason: str
    text: str
    step: int = 0
    rejected: bool = False


@dataclass(frozen=True)
class ObservedExits:
    """Exits of ranks that the launcher observed.

    Attributes:
        first: the rank that it saw exit first.
        exit_codes: the known exit codes of ranks; negative for a signal.
        killed: why the launcher killed the ranks; None if it did not.
        stragglers: the ranks that the launcher killed because they did not end after a failure.
    """

    first: int
    exit_codes: Mapping[int, int] = field(default_factory=dict)
    killed: str | None = None
    stragglers: Collection[int] = ()


def find_failure(
    records: Sequence[FailureRecord],
    states: Sequence[RankState],
    exits: ObservedExits,
    shape: MeshShape,
    timeout_s: float,
) -> Failure:
    """Find the failure to report.

    In order of preference: the first primary failure; a rank that its peers waited for until the time-out; a rank that
    another rank's error is about; a rank that ended without a report; the first peer failure.

    Args:
        records: the reports of ranks, by importance (:func:`megastack.observe.failure.by_cause`).
        states: the last states of ranks, from their flight recorders.
        exits: the exits that the launcher observed.
        shape: the mesh.
        timeout_s: ``launch.timeout_s``.
    """
    if records and not records[0].echo:
        return failure_of(records[0])
    missing = find_missing_ranks(states, shape.world_size)
    silent = silent_ranks(records, shape.world_size)
    blamed = ((rank, record.message) for record in records for rank in record.blames if rank in silent)
    found = next(((rank, _own_exit(rank, exits) or message) for rank, message in blamed), None)
    if missing is not None and missing.waited_s >= TIMEOUT_FRACTION * timeout_s:
        found = missing.rank, _describe_absence(missing, timeout_s)
    if found is None:
        timed_out = any(state.seconds >= TIMEOUT_FRACTION * timeout_s for state in states)
        candidates = _without_report(silent, exits, any_report=bool(records), timed_out=timed_out)
        preferred = [exits.first, *([missing.rank] if missing is not None else []), *candidates]
        found = next(((rank, _describe_exit(rank, exits)) for rank in preferred if rank in candidates), None)
    if found is None:
        return failure_of(records[0])
    rank, reason = found
    coordinates = describe_coordinates(shape.coordinates(rank))
    own_state = tuple(state.describe() for state in states if state.rank == rank)
    lines = [*(missing.lines if missing is not None else own_state), f"[rank {rank} | {coordinates}] {reason}"]
    return Failure(rank, coordinates, reason, "\n".join(lines), max((record.step for record in records), default=0))


def end_failed_run(
    folder: RunFolder,
    failure: Failure,
    *,
    may_write: bool = True,
    shows: bool = True,
    pid: int | None = None,
) -> RunResult:
    """Write a failure into ``status.json``, print it and return the result of the run.

    Args:
        folder: the run folder.
        failure: from :func:`find_failure`.
        may_write: whether the run still owns its folder.
        shows: whether this process prints the failure.
        pid: the process to name in the status; None keeps the current one.

    Raises:
        ConfigError: the ranks rejected the configuration.
    """
    if may_write:
        record: dict[str, Any] = {"step": failure.step, "reason": failure.reason, "rank": failure.rank}
        record |= {"coordinates": failure.coordinates, "exit_code": REJECTED if failure.rejected else FAILED}
        with contextlib.suppress(OSError):  # a full disk may be the cause
            update_status(folder.status, "failed", **record, **({} if pid is None else {"pid": pid}))
    if failure.rejected:
        raise ConfigError(failure.reason)
    if shows:
        header = f"failed after step {failure.step}; everything is in {folder.path}"
        Console(stderr=True).line(f"{header}\n{failure.text}", style="red")
    return RunResult("failed", failure.step, None, folder.path, failure.reason)


def failure_of(record: FailureRecord) -> Failure:
    """Convert the report of a rank to a failure."""
    reason = record.message if record.refused else record.error
    return Failure(record.rank, record.coordinates, reason, record.describe(), record.step, record.refused)


def _without_report(silent: Sequence[int], exits: ObservedExits, *, any_report: bool, timed_out: bool) -> Sequence[int]:
    """Return the ranks without a report that may have caused the failure.

    NCCL ends ranks by SIGABRT that wait too long, or that learn of an error of another rank. If such a rank ended
    first, one that crashed comes before it. After a time-out, a straggler is a rank that did not respond. Without a
    time-out, a straggler may simply be waiting, as with NCCL.
    """
    ended = [rank for rank in silent if rank not in exits.stragglers]
    stragglers = [rank for rank in silent if rank in exits.stragglers]
    if timed_out:
        return [rank for rank in ended if exits.exit_codes.get(rank) != -signal.SIGABRT] or stragglers or ended
    if exits.exit_codes.get(exits.first) == -signal.SIGABRT:
        ended = [rank for rank in ended if exits.exit_codes.get(rank, 0) not in _BY_OTHERS] or ended
    return ended or ([] if any_report else stragglers)


def _describe_absence(missing: MissingRank, timeout_s: float) -> str:
    what = "join" if missing.operation is None else f"arrive at {missing.operation}"
    return f"did not {what} within launch.timeout_s={timeout_s:g}"


def _own_exit(rank: int, exits: ObservedExits) -> str | None:
    """Describe how a rank ended; None if it is unknown, or if the launcher or the agent ended it."""
    if rank in exits.stragglers or exits.exit_codes.get(rank, 0) in (0, -signal.SIGTERM):
        return None
    return _describe_exit(rank, exits)


def _describe_exit(rank: int, exits: ObservedExits) -> str:
    if exits.killed is not None:
        return exits.killed
    if rank in exits.stragglers:
        return "did not end within launch.grace_s, and was killed"
    if code := exits.exit_codes.get(rank):
        return f"ended by {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return "ended without a traceback, as when it is killed or out of memory"
