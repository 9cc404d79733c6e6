"""Collectives on small Python values, for setup and reports; not used inside a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import torch.distributed as dist

from megastack.comm.group import AxisGroup
from megastack.comm.peers import absent_peers

T = TypeVar("T")


def all_gather_objects(value: T, group: AxisGroup) -> list[T]:
    """Every rank's value, in group order, on every rank; values are pickled."""
    if group.size == 1:
        return [value]
    if (peers := absent_peers()) is not None:
        return peers.gathered(value, group)
    values: list[T | None] = [None] * group.size
    with group.blocks("all_gather_object"):
        dist.all_gather_object(values, value, group=group.group)
    return cast("list[T]", values)


def gather_objects(value: T, group: AxisGroup) -> list[T]:
    """Every rank's value, in group order, on the group's first rank; empty on the others."""
    if group.size == 1:
        return [value]
    if (peers := absent_peers()) is not None:
        return peers.gathered(value, group) if group.rank == 0 else []
    values: list[T | None] | None = [None] * group.size if group.rank == 0 else None
    with group.blocks("gather_object"):
        dist.gather_object(value, values, dst=group.ranks[0], group=group.group)
    return cast("list[T]", values or [])


def average_by_key(values: Mapping[str, float], group: AxisGroup) -> dict[str, float]:
    """The mean of each key over the ranks that have it, on every rank of the group, with sorted keys.

    Useful for your own metrics, in a hook for example. Ranks may have different keys, in any order, or none. Must be
    called on every rank of the group. Communicates once, regardless of the keys.
    """
    collected: dict[str, list[float]] = {}
    for theirs in all_gather_objects(dict(values), group):
        for key, value in theirs.items():
            collected.setdefault(key, []).append(value)
    return {key: sum(collected[key]) / len(collected[key]) for key in sorted(collected)}
