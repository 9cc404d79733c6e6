"""Ranks of somebody else's launcher refuse a configuration together: any may find it broken, the first one reports.

They use the store in which they met; where nothing is to be trained, no process group is opened.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megastack.errors import ConfigError, Fault

INSPECTS_S = 3600.0
"""For how long the first rank may look at model and data."""
LEAVES_S = 5.0
"""How long it stays for the others to hear the report, for the store may end with it."""


def any_broken(store: dist.Store, rank: int, ranks: int, own: Sequence[Fault]) -> bool:
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


def refuse(store: dist.Store, rank: int, ranks: int, report: Callable[[list[Fault]], Sequence[Fault]]) -> NoReturn:
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
        faults = report(_found(store, ranks))
        store.set("refused", pickle.dumps(tuple(faults)).hex())
    else:
        store.wait(["refused"], timedelta(seconds=INSPECTS_S))
        faults = _read(store, "refused")
    if store.add("heard", 1) == ranks:
        store.set("all_heard", "")
    with contextlib.suppress(dist.DistError):
        if rank == 0:
            store.wait(["all_heard"], timedelta(seconds=LEAVES_S))
    raise ConfigError.of(faults)


def _found(store: dist.Store, ranks: int) -> list[Fault]:
    """What the ranks found, each fault once."""
    told = [f"broken/{rank}" for rank in range(ranks)]
    all_faults = [fault for key in told if store.check([key]) for fault in _read(store, key)]
    return list({str(fault): fault for fault in all_faults}.values())


def _read(store: dist.Store, key: str) -> tuple[Fault, ...]:
    faults: tuple[Fault, ...] = pickle.loads(bytes.fromhex(store.get(key).decode()))
    return faults
