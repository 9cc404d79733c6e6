"""Collectives of a save or load: agree on a flag, create a global plan, and fail on all ranks with the same error.

``torch.distributed.checkpoint`` already propagates a failure of any rank to all ranks, but its exception hides the
cause. Here it becomes one :class:`CheckpointError` with the message of each failed rank and the same text on all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megastack.comm.backend import transport_of
from megastack.comm.group import AxisGroup
from megastack.comm.objects import gather_objects
from megastack.errors import CheckpointError, counted

T = TypeVar("T")
_MOST_RANKS_SHOWN = 8


def all_true(value: bool, world: AxisGroup) -> bool:
    """Whether the value is true on every rank."""
    if world.group is None:
        return value
    device = "cpu" if "gloo" in dist.get_backend_config(world.group) else "cuda"
    flag = torch.tensor([int(value)], device=device)
    with world.blocks("all_reduce"):
        transport_of(world, flag.device).start_all_reduce_(flag, world, "min").wait()
    return bool(flag.item())


@dataclass(frozen=True)
class _Failed:
    """Sent by a rank instead of a value: the error of each failed rank."""

    by_rank: Mapping[int, str]


def make_global_plan(
    task: str, world: AxisGroup, local_plan: Callable[[], T], global_plan: Callable[[list[T]], list[T]]
) -> T:
    """Gather the local plan of every rank, create the final plans on the first rank, and return this rank's plan.

    Raises:
        CheckpointError: the same on every rank, if ``local_plan`` fails on any rank or ``global_plan`` on the first.
    """
    plans = gather_objects(_attempt(world.rank, local_plan), world)
    final: Sequence[T | _Failed] = []
    if world.rank == 0:
        failed = {rank: text for plan in plans if isinstance(plan, _Failed) for rank, text in plan.by_rank.items()}
        valid = [plan for plan in plans if not isinstance(plan, _Failed)]
        outcome = _Failed(failed) if failed else _attempt(0, lambda: global_plan(valid))
        final = [outcome] * world.size if isinstance(outcome, _Failed) else outcome
    plan = _scatter(final, world)
    if isinstance(plan, _Failed):
        raise CheckpointError(f"{task}: {describe_failures(plan.by_rank)}").about(plan.by_rank)
    return plan


def _attempt(rank: int, make: Callable[[], T]) -> T | _Failed:
    try:
        return make()
    except Exception as error:
        return _Failed({rank: describe_error(error)})


def _scatter(values: Sequence[T], world: AxisGroup) -> T:
    """Scatter one value to each rank; the first rank passes the values, the others pass none."""
    if world.group is None:
        return values[0]
    received: list[Any] = [None]
    with world.blocks("scatter_object"):
        dist.scatter_object_list(received, list(values) or None, src=world.ranks[0], group=world.group)
    value: T = received[0]
    return value


def local_work(method: Callable[..., T]) -> Callable[..., T]:
    """Mark a method that torch calls between its collectives as local work, which other ranks may be waiting for."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        with self.flight_recorder.local_work():
            return method(self, *args, **kwargs)

    return call


@contextmanager
def checkpoint_errors(task: str) -> Iterator[None]:
    """Convert torch's CheckpointException into one CheckpointError with the error of each failed rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        causes = {rank: describe_error(wrapped[0]) for rank, wrapped in error.failures.items()}
        raise CheckpointError(f"{task}: {describe_failures(causes)}").about(causes) from error


def describe_failures(failures: Mapping[int, str]) -> str:
    """Format the error of each failed rank, one per line."""
    by_rank = sorted(failures.items())
    lines = [f"rank {rank}: {text}" for rank, text in by_rank[:_MOST_RANKS_SHOWN]]
    rest = len(by_rank) - _MOST_RANKS_SHOWN
    return "\n".join(lines + ([f"and {counted(rest, 'more rank')}"] if rest > 0 else []))


def describe_error(error: BaseException) -> str:
    """Format an error as text, with its class unless it is a CheckpointError."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
