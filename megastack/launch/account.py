"""Which failure ended a run: the accounts that ranks left, where they stood, and what their launcher saw."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megastack.mesh.shape import MeshShape, describe_coordinates
from megastack.observe.failure import FailureRecord, silent_ranks
from megastack.observe.watchdog import Missing, Report, diagnose

MOST_OF_IT = 0.9
"""A wait of this part of the time-out ended by it."""


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
    """

    first: int
    exit_codes: Mapping[int, int]
    killed: str | None = None


def account_of(
    records: Sequence[FailureRecord], reports: Sequence[Report], seen: Seen, shape: MeshShape, timeout_s: float
) -> Account:
    """The rank that failed by itself first, else one that the others waited for in vain or that died without a word,
    else the first to miss another."""
    silent = silent_ranks(records, shape.world_size)
    own = bool(records) and not records[0].echo
    missing = None if own else diagnose(reports, shape.world_size)
    late = missing is not None and missing.waited_s >= MOST_OF_IT * timeout_s
    if records and (own or not (silent or late)):
        record = records[0]
        reason = record.message if record.refused else record.error
        return Account(record.rank, record.coordinates, reason, record.describe(), record.step, record.refused)
    rank, reason = _culprit(silent, missing if late else None, seen, timeout_s)
    coordinates = describe_coordinates(shape.coordinates(rank))
    lines = [*(missing.lines if missing is not None else ()), f"[rank {rank} | {coordinates}] {reason}"]
    return Account(rank, coordinates, reason, "\n".join(lines), max((record.step for record in records), default=0))


def _culprit(silent: Sequence[int], late: Missing | None, seen: Seen, timeout_s: float) -> tuple[int, str]:
    """The rank to name, and what is known of it."""
    if late is not None:
        what = "join" if late.operation is None else f"arrive at {late.operation}"
        return late.rank, f"did not {what} within launch.timeout_s={timeout_s:g}"
    rank = seen.first if seen.first in silent else silent[0]
    if seen.killed is not None:
        return rank, seen.killed
    if seen.exit_codes.get(rank):
        return rank, f"ended by {_cause(seen.exit_codes[rank])}"
    return rank, "ended without a traceback, as when it is killed or out of memory"


def _cause(exitcode: int) -> str:
    return signal.Signals(-exitcode).name if exitcode < 0 else f"exit code {exitcode}"
