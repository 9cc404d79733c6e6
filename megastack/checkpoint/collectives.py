"""Ranks that agree: gather a small value from every rank, plan together, and fail on all ranks with the same error.

``torch.distributed.checkpoint`` already brings a failure of any rank to all of them; what it raises buries the cause,
so it is turned here into one :class:`CheckpointError` with the ranks' own messages, the same text everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megastack.comm.group import AxisGroup
from megastack.errors import CheckpointError, counted

T = TypeVar("T")
_SHOWN = 8


def gather(value: T, world: AxisGroup) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if world.group is None:
        return [value]
    values: list[T | None] = [None] * world.size
    with world.blocks("all_gather_object"):
        dist.all_gather_object(values, value, group=world.group)
    return [found for found in values if found is not None]


def all_true(value: bool, world: AxisGroup) -> bool:
    """Whether the value is true on every rank."""
    if world.group is None:
        return value
    device = "cpu" if "gloo" in dist.get_backend_config(world.group) else "cuda"
    flag = torch.tensor([int(value)], device=device)
    with world.blocks("all_reduce"):
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=world.group)
    return bool(flag.item())


@dataclass(frozen=True)
class _Failed:
    """What a rank sends instead of a value."""

    by_rank: Mapping[int, str]


def plan_together(task: str, world: AxisGroup, own: Callable[[], T], everyone: Callable[[list[T]], list[T]]) -> T:
    """Make a plan on every rank, let the first rank turn all of them into the final ones, and return this rank's.

    Raises:
        CheckpointError: the same on every rank, when ``own`` fails on any rank or ``everyone`` on the first.
    """
    plans = _to_first(_attempt(world.rank, own), world)
    final: list[Any] = []
    if world.rank == 0:
        failed = {rank: text for plan in plans if isinstance(plan, _Failed) for rank, text in plan.by_rank.items()}
        outcome = _Failed(failed) if failed else _attempt(0, lambda: everyone(plans))
        final = [outcome] * world.size if isinstance(outcome, _Failed) else outcome
    mine = _from_first(final, world)
    if isinstance(mine, _Failed):
        raise CheckpointError(f"{task}: {described(mine.by_rank)}").about(mine.by_rank)
    return mine


def _attempt(rank: int, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        return _Failed({rank: said(error)})


def _to_first(value: Any, world: AxisGroup) -> list[Any]:
    if world.group is None:
        return [value]
    values = [None] * world.size if world.rank == 0 else None
    with world.blocks("gather_object"):
        dist.gather_object(value, values, dst=world.ranks[0], group=world.group)
    return values or []


def _from_first(values: list[Any], world: AxisGroup) -> Any:
    if world.group is None:
        return values[0]
    received = [None]
    with world.blocks("scatter_object"):
        dist.scatter_object_list(received, values or None, src=world.ranks[0], group=world.group)
    return received[0]


def local_work(method: Callable[..., T]) -> Callable[..., T]:
    """A method that torch calls on the way, as this rank's own work: the others may wait for it meanwhile."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        with self.flight_recorder.local_work():
            return method(self, *args, **kwargs)

    return call


@contextmanager
def one_error(task: str) -> Iterator[None]:
    """Turn a failure that torch reports from some ranks into one CheckpointError that says what failed where."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = {rank: said(wrapped[0]) for rank, wrapped in error.failures.items()}
        raise CheckpointError(f"{task}: {described(causes)}").about(causes) from error


def described(failures: Mapping[int, str]) -> str:
    """What failed on which rank, one line each."""
    by_rank = sorted(failures.items())
    lines = [f"rank {rank}: {text}" for rank, text in by_rank[:_SHOWN]]
    more = [f"and {counted(len(by_rank) - _SHOWN, 'more rank')}"] if len(by_rank) > _SHOWN else []
    return "\n".join(lines + more)


def said(error: BaseException) -> str:
    """An error as one line of a report."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
