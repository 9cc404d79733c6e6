"""Collectives on small Python values, for set-up and reports; not used inside a step."""

from __future__ import annotations

from typing import TypeVar, cast

import torch.distributed as dist

from megastack.comm.group import AxisGroup

T = TypeVar("T")


def all_gather_objects(value: T, group: AxisGroup) -> list[T]:
    """Every rank's value, in group order, on every rank; values are pickled."""
    if group.size == 1:
        return [value]
    values: list[T | None] = [None] * group.size
    with group.blocks("all_gather_object"):
        dist.all_gather_object(values, value, group=group.group)
    return cast("list[T]", values)


def gather_objects(value: T, group: AxisGroup) -> list[T]:
    """Every rank's value, in group order, on the group's first rank; empty on the others."""
    if group.size == 1:
        return [value]
    values: list[T | None] | None = [None] * group.size if group.rank == 0 else None
    with group.blocks("gather_object"):
        dist.gather_object(value, values, dst=group.ranks[0], group=group.group)
    return cast("list[T]", values or [])
