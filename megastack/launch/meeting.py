"""Where the ranks of one start of a job find each other.

The elastic agents of torchrun keep one store over all restarts, and the addresses that the ranks of an earlier start
left in it look like those of this one: ranks would call processes that are gone. The number of restarts does not tell
starts apart either, since every agent counts its own. So the ranks agree on a name that is new, and use the store
beneath it. Each rank shows a number that nobody has had before; the first rank answers every such number with the name,
until every rank has been seen under it. Whoever waits for others in vain can tell who was not seen.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from megastack.errors import MegastackError, RankEnvironmentError
from megastack.launch.start import NotStarted
from megastack.mesh.environment import RankEnvironment, agent_serves_store
from megastack.mesh.store import open_store

LOOKS_EVERY_S = 0.02
OTHERS_ASK_S = 1.0
"""How long a rank that holds the store stays, so that the others can ask it who is missing."""


def meet(launched: RankEnvironment, timeout_s: float) -> dist.Store:
    """A store that only the ranks of this start share; all of them call.

    Args:
        launched: what the launcher says about this rank.
        timeout_s: how long one waits for another.

    Raises:
        NotStarted: about those that did not come in time.
        RankEnvironmentError: the address of rank 0 cannot be used.
    """
    rank, ranks, shared, limit = launched.rank, launched.world_size, agent_serves_store(), timedelta(seconds=timeout_s)
    store, name = open_store(launched, timeout_s), "start"
    if store is None:
        raise _unreachable(launched, timeout_s, shared=shared)
    try:
        if shared:
            name = agree(store, rank, ranks, timeout_s)
        else:
            store.set(_seen(name, rank), "")
    except dist.DistError as error:
        raise _unreachable(launched, timeout_s, shared=shared) from error
    if missing := _missing(store, name, ranks, limit):
        time.sleep(0 if shared or rank else OTHERS_ASK_S)
        raise _not_joined(missing, timeout_s)
    return dist.PrefixStore(name, store)


def _unreachable(launched: RankEnvironment, timeout_s: float, *, shared: bool) -> MegastackError:
    """The error of a rank that finds no store: of rank 0's absence, or of a store that torchrun should serve."""
    address, port = launched.require_endpoint()
    if shared or launched.rank == 0:
        rule = f"no store answered at port {port} within launch.timeout_s={timeout_s:g}"
        return RankEnvironmentError(f"MASTER_ADDR={address}: {rule}; use the address that torchrun's agent serves")
    where = f"(it could not be reached at MASTER_ADDR:MASTER_PORT {address}:{port})"
    return NotStarted(f"{_not_joined([0], timeout_s)} {where}").about([0])


def _missing(store: dist.Store, name: str, ranks: int, limit: timedelta) -> list[int]:
    """The ranks that were not seen in time; the first one, which may hold the store, where that does not answer."""
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
    who = f"rank{'' if len(missing) == 1 else 's'} {', '.join(map(str, missing))}"
    return NotStarted(f"{who} did not join within launch.timeout_s={timeout_s:g}").about(missing)


def agree(store: dist.Store, rank: int, ranks: int, timeout_s: float) -> str:
    """A name that these ranks have in common and that was never used in this store.

    Raises:
        NotStarted: on the first rank, about those that did not come in time.
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
                if answered.get(rank) != number:  # the first one may be that of a process that is gone
                    answered[rank] = number
                    store.set(_answer(number.decode()), name)
        missing = [rank for rank in missing if not store.check([_seen(name, rank)])]
        if missing and time.monotonic() > deadline:
            raise _not_joined(missing, timeout_s)
        if missing:
            time.sleep(LOOKS_EVERY_S)
    return name


def _shown(rank: int, ranks: int) -> str:
    return f"megastack/shown/{ranks}/{rank}"


def _answer(number: str) -> str:
    return f"megastack/answer/{number}"


def _seen(name: str, rank: int) -> str:
    return f"megastack/{name}/seen/{rank}"
