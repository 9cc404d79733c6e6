"""Rendezvous of the ranks of one start: forked ranks in shared memory, a launcher's ranks in a store.

**Forked ranks.** A forked child inherits the parent's locks in whatever state they are in. If another thread of the
parent holds one at that moment, the child can never acquire it. The thread that serves the TCPStore takes such a lock,
in the C library's resolver, on every connection. Ranks therefore wait at a :class:`StartBarrier` in shared memory until
all of them have been forked, and connect only then.

**Ranks of torchrun and srun.** The elastic agents of torchrun keep one store over all restarts, and the addresses that
ranks of an earlier start left in it look like current ones. The number of restarts does not distinguish starts either,
since every agent has its own count. The ranks therefore agree on a new name, and use the store with that prefix. Each
rank publishes a unique number; rank 0 answers every number with the name, until it has seen every rank under that name.
A rank that times out can report which ranks are missing.

Ranks also use this store to reject a configuration together: any rank may find it invalid, and one rank prints the
report. No process group is created unless training starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megastack.errors import ConfigError, ErrorLine, MegastackError, RankEnvironmentError
from megastack.mesh.environment import RankEnvironment, agent_serves_store, read_environment
from megastack.mesh.store import open_store

BARRIER_POLL_S = 0.002
STORE_POLL_S = 0.02
STORE_LINGER_S = 1.0
"""How long a rank that serves the store stays after a time-out, so that others can ask which ranks are missing."""
CHECKS_S = 3600.0
"""How long the other ranks wait while rank 0 checks model and data of an invalid configuration."""
REPORT_LINGER_S = 5.0
"""How long rank 0 waits for the others to read its report, since the store may end with rank 0."""
REJECTION_S = 30.0
"""The time-out of a rendezvous to reject a configuration, whose own time-out may be invalid."""
REPORTER_S = 2.0
"""How long a rank waits for rank 0 to report the same error."""

_RAISED = "error/raised_by"


class NotStarted(MegastackError):
    """Some ranks did not start or join in time; ``ranks`` lists the missing ones."""


class StartBarrier:
    """A barrier at which forked ranks wait until all of them have been forked.

    It consists of flags in shared memory, without a lock: a rank that is killed cannot block the others.

    Args:
        ranks: the number of ranks.
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self._arrived = multiprocessing.get_context("fork").RawArray("b", ranks)
        self._timeout_s = timeout_s

    def wait(self, rank: int) -> None:
        """Wait as ``rank`` until all ranks have arrived.

        Raises:
            NotStarted: some ranks were not started in time.
        """
        self._arrived[rank] = 1
        deadline = time.monotonic() + self._timeout_s
        while missing := [other for other, here in enumerate(self._arrived) if not here]:
            if time.monotonic() > deadline:
                ranks = f"ranks {', '.join(map(str, missing))} were" if missing[1:] else f"rank {missing[0]} was"
                raise NotStarted(f"{ranks} not started within launch.timeout_s={self._timeout_s:g}").about(missing)
            time.sleep(BARRIER_POLL_S)


def join_store(launched: RankEnvironment, timeout_s: float) -> dist.Store:
    """Return a store that only the ranks of this start share; called on every rank.

    Args:
        launched: the rank variables of this process.
        timeout_s: how long a rank waits for the others.

    Raises:
        NotStarted: ranks did not join in time.
        RankEnvironmentError: the address of rank 0 cannot be used.
    """
    rank, ranks, shared, limit = launched.rank, launched.world_size, agent_serves_store(), timedelta(seconds=timeout_s)
    store, name = open_store(launched, timeout_s), "start"
    if store is None:
        raise _unreachable(launched, timeout_s, shared=shared)
    try:
        if shared:
            name = agree_on_name(store, rank, ranks, timeout_s)
        else:
            store.set(_seen(name, rank), "")
    except dist.DistError as error:
        raise _unreachable(launched, timeout_s, shared=shared) from error
    if missing := _missing(store, name, ranks, limit):
        time.sleep(0 if shared or rank else STORE_LINGER_S)
        raise _not_joined(missing, timeout_s)
    return dist.PrefixStore(name, store)


def _unreachable(launched: RankEnvironment, timeout_s: float, *, shared: bool) -> MegastackError:
    """Return the error of a rank that cannot reach the store: rank 0 is missing, or torchrun does not serve it."""
    address, port = launched.require_endpoint()
    if shared or launched.rank == 0:
        rule = f"no store answered at port {port} within launch.timeout_s={timeout_s:g}"
        return RankEnvironmentError(f"MASTER_ADDR={address}: {rule}; use the address that torchrun's agent serves")
    where = f"(it could not be reached at MASTER_ADDR:MASTER_PORT {address}:{port})"
    return NotStarted(f"{_not_joined([0], timeout_s)} {where}").about([0])


def _missing(store: dist.Store, name: str, ranks: int, limit: timedelta) -> list[int]:
    """Return the ranks that did not join in time; rank 0, which may serve the store, if the store does not respond."""
    marks = [_seen(name, rank) for rank in range(ranks)]
    try:
        store.wait(marks, limit)
        return []
    except dist.DistError:
        pass
    try:
        return [rank for rank, mark in enumerate(marks) if not store.check([mark])]
    except dist.DistError:
        return [0]


def _not_joined(missing: list[int], timeout_s: float) -> NotStarted:
    ranks = f"rank{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
    return NotStarted(f"{ranks} did not join within launch.timeout_s={timeout_s:g}").about(missing)


def agree_on_name(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> str:
    """Return a name that is the same on all ranks and new in this store.

    Raises:
        NotStarted: on rank 0, if ranks did not join in time.
    """
    return _lead(store, ranks, timeout_s) if rank == 0 else _follow(store, rank, ranks)


def _follow(store: dist.Store, rank: int, ranks: int) -> str:
    number = uuid.uuid4().hex
    store.set(_shown(rank, ranks), number)
    name: str = store.get(_answer(number)).decode()
    store.set(_seen(name, rank), "")
    return name


def _lead(store: dist.Store, ranks: int, timeout_s: float) -> str:
    name, deadline = f"start_{uuid.uuid4().hex}", time.monotonic() + timeout_s
    store.set(_seen(name, 0), "")
    answered, missing = dict[int, bytes](), list(range(1, ranks))
    while missing:
        for rank in missing:
            if store.check([_shown(rank, ranks)]):
                number = store.get(_shown(rank, ranks))
                if answered.get(rank) != number:  # the first number may belong to a process that has ended
                    answered[rank] = number
                    store.set(_answer(number.decode()), name)
        missing = [rank for rank in missing if not store.check([_seen(name, rank)])]
        if missing and time.monotonic() > deadline:
            raise _not_joined(missing, timeout_s)
        if missing:
            time.sleep(STORE_POLL_S)
    return name


def _shown(rank: int, ranks: int) -> str:
    return f"megastack/shown/{ranks}/{rank}"


def _answer(number: str) -> str:
    return f"megastack/answer/{number}"


def _seen(name: str, rank: int) -> str:
    return f"megastack/{name}/seen/{rank}"


def any_invalid(store: dist.Store, rank: int, ranks: int, own: Sequence[ErrorLine]) -> bool:
    """Whether any rank finds its configuration invalid; called on all ranks, with the same result.

    Args:
        store: shared by these ranks only.
        rank: this rank.
        ranks: the number of ranks.
        own: the errors that this rank finds.
    """
    if own:
        store.set(f"errors/{rank}", pickle.dumps(tuple(own)).hex())
        store.add("invalid", 1)
    if store.add("compared", 1) == ranks:
        store.set("all_compared", "")
    store.wait(["all_compared"])
    return store.add("invalid", 0) > 0


def reject(
    store: dist.Store, rank: int, ranks: int, report: Callable[[list[ErrorLine]], Sequence[ErrorLine]]
) -> NoReturn:
    """Raise the same report on all ranks; called on all ranks.

    Args:
        store: shared by these ranks only.
        rank: this rank.
        ranks: the number of ranks.
        report: maps the errors that the ranks found to all errors; called on rank 0.

    Raises:
        ConfigError: always.
    """
    if rank == 0:
        errors = report(_errors_of_ranks(store, ranks))
        store.set("report", pickle.dumps(tuple(errors)).hex())
    else:
        store.wait(["report"], timedelta(seconds=CHECKS_S))
        errors = _read(store, "report")
    if store.add("heard", 1) == ranks:
        store.set("all_heard", "")
    with contextlib.suppress(dist.DistError):
        if rank == 0:
            store.wait(["all_heard"], timedelta(seconds=REPORT_LINGER_S))
    raise ConfigError.of(errors).reported_by(0)


def reject_early(errors: Sequence[ErrorLine]) -> NoReturn:
    """Reject together with the other ranks before there is a configuration; they call this or :func:`any_invalid`.

    Raises:
        ConfigError: always. If the others do not join, the first rank that joined reports its own errors.
    """
    launched = read_environment()
    assert launched is not None, "called on ranks of a launcher"
    try:
        store = join_store(launched, REJECTION_S)
    except (NotStarted, RankEnvironmentError) as error:
        raise rejection_without_others(launched, errors, error) from None
    rank, ranks = launched.rank, launched.world_size
    try:
        any_invalid(store, rank, ranks, errors)
        reject(store, rank, ranks, lambda found: found)
    except dist.DistError:  # the others joined, but did not exchange errors in time
        raise ConfigError.of(errors).reported_by(rank) from None


def rejection_without_others(
    launched: RankEnvironment, errors: Sequence[ErrorLine], error: NotStarted | RankEnvironmentError
) -> MegastackError:
    """Return the error of a rank with an invalid configuration whose rendezvous failed.

    Args:
        launched: the rank variables of this process.
        errors: the errors that it found.
        error: why the rendezvous failed.
    """
    if isinstance(error, RankEnvironmentError):
        return ConfigError.of([*errors, str(error)]) if launched.rank == 0 else error
    here = (rank for rank in range(launched.world_size) if rank not in error.ranks)
    return ConfigError.of(errors).reported_by(next(here, launched.rank))


def choose_reporter(store: dist.Store, rank: int, ranks: int, error: MegastackError) -> None:
    """Choose the rank that prints an error raised on some or all ranks; called on the ranks that raise it.

    The reporter is rank 0 if it raises the same error, otherwise the first rank that does. A rank that cannot determine
    the reporter prints the error: a duplicate is better than nothing.

    Args:
        store: shared by these ranks only.
        rank: this rank.
        ranks: the number of ranks.
        error: the error that this rank raises; its reporter is set.
    """
    key = f"error/{hashlib.sha256(str(error).encode(errors='surrogateescape')).hexdigest()}"
    error.reporter = rank
    with contextlib.suppress(dist.DistError):
        store.set(_RAISED, str(rank))
        if rank == 0:
            store.set(f"{key}/first", "")
            if store.add(f"{key}/claims", 1) > 1:
                error.reporter = -1  # a rank that has stopped waiting for this one
            _appears(store, f"{key}/heard")  # the store may end with this rank
            return
        if _appears(store, f"{key}/first") or store.add(f"{key}/claims", 1) > 1:
            error.reporter = 0
        if store.add(f"{key}/others", 1) == ranks - 1:
            store.set(f"{key}/heard", "")


def reporter_of_others(store: dist.Store) -> int | None:
    """Return a rank that raised and reports an error, for a rank that only lost its peers; None if there is none."""
    try:
        return int(store.get(_RAISED)) if _appears(store, _RAISED) else None
    except dist.DistError:  # the store has ended with rank 0
        return None


def _appears(store: dist.Store, key: str) -> bool:
    """Whether a key is set within :data:`REPORTER_S`; the store's own wait would log its time-out."""
    deadline = time.monotonic() + REPORTER_S
    while not (found := store.check([key])) and time.monotonic() < deadline:
        time.sleep(STORE_POLL_S)
    return found


def _errors_of_ranks(store: dist.Store, ranks: int) -> list[ErrorLine]:
    """Return the errors of all ranks, without duplicates."""
    keys = [f"errors/{rank}" for rank in range(ranks)]
    found = [error for key in keys if store.check([key]) for error in _read(store, key)]
    return list({str(error): error for error in found}.values())


def _read(store: dist.Store, key: str) -> tuple[ErrorLine, ...]:
    errors: tuple[ErrorLine, ...] = pickle.loads(bytes.fromhex(store.get(key).decode()))
    return errors
