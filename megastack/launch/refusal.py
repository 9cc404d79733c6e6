"""Ranks of somebody else's launcher refuse a configuration together: any may find it broken, the first one reports.

They use the store in which they met; where nothing is to be trained, no process group is opened. An error that only
some ranks raise afterwards, while they read data or weights, is printed by one of them (:func:`choose_reporter`).
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megastack.errors import ConfigError, ErrorLine, MegastackError, RankEnvironmentError
from megastack.launch.meeting import LOOKS_EVERY_S, meet
from megastack.launch.start import NotStarted
from megastack.mesh.environment import RankEnvironment, read_environment

INSPECTS_S = 3600.0
"""For how long the first rank may look at model and data."""
LEAVES_S = 5.0
"""How long it stays for the others to hear the report, for the store may end with it."""
REFUSING_S = 30.0
"""How long ranks wait for each other to refuse a configuration whose own time-out may be what is refused."""
REPORTS_S = 2.0
"""How long a rank waits for rank 0 to report the same error."""

_RAISED = "error/raised_by"


def any_broken(store: dist.Store, rank: int, ranks: int, own: Sequence[ErrorLine]) -> bool:
    """Whether a rank finds its configuration broken, alike on all ranks, which all call.

    Args:
        store: shared by these ranks alone.
        rank: this one.
        ranks: how many there are.
        own: what this one finds.
    """
    if own:
        store.set(f"broken/{rank}", pickle.dumps(tuple(own)).hex())
        store.add("broken", 1)
    if store.add("compared", 1) == ranks:
        store.set("all_compared", "")
    store.wait(["all_compared"])
    return store.add("broken", 0) > 0


def refuse(
    store: dist.Store, rank: int, ranks: int, report: Callable[[list[ErrorLine]], Sequence[ErrorLine]]
) -> NoReturn:
    """Raise the same report on all ranks, which all call.

    Args:
        store: shared by these ranks alone.
        rank: this one.
        ranks: how many there are.
        report: everything that is wrong, from what all ranks found; called on the first one.

    Raises:
        ConfigError: always.
    """
    if rank == 0:
        errors = report(_found(store, ranks))
        store.set("refused", pickle.dumps(tuple(errors)).hex())
    else:
        store.wait(["refused"], timedelta(seconds=INSPECTS_S))
        errors = _read(store, "refused")
    if store.add("heard", 1) == ranks:
        store.set("all_heard", "")
    with contextlib.suppress(dist.DistError):
        if rank == 0:
            store.wait(["all_heard"], timedelta(seconds=LEAVES_S))
    raise ConfigError.of(errors).reported_by(0)


def refuse_early(errors: Sequence[ErrorLine]) -> NoReturn:
    """Refuse with the other ranks before there is a configuration; they compare theirs or come here as well.

    Raises:
        ConfigError: always; without the others, their first rank that is here reports what it found.
    """
    launched = read_environment()
    assert launched is not None, "called on ranks of a launcher"
    try:
        store = meet(launched, REFUSING_S)
    except (NotStarted, RankEnvironmentError) as error:
        raise refusal_without_others(launched, errors, error) from None
    rank, ranks = launched.rank, launched.world_size
    try:
        any_broken(store, rank, ranks, errors)
        refuse(store, rank, ranks, lambda found: found)
    except dist.DistError:  # the others came, but do not compare in time
        raise ConfigError.of(errors).reported_by(rank) from None


def refusal_without_others(
    launched: RankEnvironment, errors: Sequence[ErrorLine], error: NotStarted | RankEnvironmentError
) -> MegastackError:
    """The error of a rank that found faults but could not meet the others.

    Args:
        launched: what the launcher says about this rank.
        faults: what it found.
        error: why they did not meet.
    """
    if isinstance(error, RankEnvironmentError):
        return ConfigError.of([*errors, str(error)]) if launched.rank == 0 else error
    here = (rank for rank in range(launched.world_size) if rank not in error.ranks)
    return ConfigError.of(errors).reported_by(next(here, launched.rank))


def choose_reporter(store: dist.Store, rank: int, ranks: int, error: MegastackError) -> None:
    """Choose the rank that prints an error which some ranks raise, perhaps not all; those ranks call.

    Rank 0 where it raises the same error, else the first of them. A rank that cannot tell prints: twice is better than
    never.

    Args:
        store: shared by these ranks alone.
        rank: this one.
        ranks: how many there are.
        error: what this rank raises; its reporter is set.
    """
    key = f"error/{hashlib.sha256(str(error).encode(errors='surrogateescape')).hexdigest()}"
    error.reporter = rank
    with contextlib.suppress(dist.DistError):
        store.set(_RAISED, str(rank))
        if rank == 0:
            store.set(f"{key}/first", "")
            if store.add(f"{key}/claims", 1) > 1:
                error.reporter = -1  # a rank that did not wait for this one any longer
            _appears(store, f"{key}/heard")  # the store may end with this rank
            return
        if _appears(store, f"{key}/first") or store.add(f"{key}/claims", 1) > 1:
            error.reporter = 0
        if store.add(f"{key}/others", 1) == ranks - 1:
            store.set(f"{key}/heard", "")


def reporter_of_others(store: dist.Store) -> int | None:
    """A rank that raised an error which it reports, for a rank that only lost the others; ``None`` if none did."""
    try:
        return int(store.get(_RAISED)) if _appears(store, _RAISED) else None
    except dist.DistError:  # the store has ended with rank 0
        return None


def _appears(store: dist.Store, key: str) -> bool:
    """Whether a key is set before long; a wait of the store itself would log that it timed out."""
    deadline = time.monotonic() + REPORTS_S
    while not (found := store.check([key])) and time.monotonic() < deadline:
        time.sleep(LOOKS_EVERY_S)
    return found


def _found(store: dist.Store, ranks: int) -> list[ErrorLine]:
    """What the ranks found, each fault once."""
    told = [f"broken/{rank}" for rank in range(ranks)]
    all_errors = [error for key in told if store.check([key]) for error in _read(store, key)]
    return list({str(error): error for error in all_errors}.values())


def _read(store: dist.Store, key: str) -> tuple[ErrorLine, ...]:
    errors: tuple[ErrorLine, ...] = pickle.loads(bytes.fromhex(store.get(key).decode()))
    return errors
