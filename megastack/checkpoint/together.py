"""Ranks that agree: gather a small value from every rank, and fail on all ranks with the same error.

``torch.distributed.checkpoint`` already brings a failure of any rank to all of them; what it raises buries the cause,
so it is turned here into one :class:`CheckpointError` with the ranks' own messages, the same text everywhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megastack.comm.group import AxisGroup
from megastack.errors import CheckpointError

T = TypeVar("T")
_SHOWN = 8


def gather(value: T, world: AxisGroup) -> list[T]:
    """Every rank's value, by rank, on every rank."""
    if world.group is None:
        return [value]
    values: list[T | None] = [None] * world.size
    dist.all_gather_object(values, value, group=world.group)
    return [found for found in values if found is not None]


@contextmanager
def one_error(task: str) -> Iterator[None]:
    """Turn a failure that torch reports from some ranks into one CheckpointError that says what failed where."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        raise CheckpointError(f"{task}: {_causes(error)}") from error


def _causes(error: CheckpointException) -> str:
    by_rank = sorted(error.failures.items())
    said = [f"rank {rank}: {_said(wrapped[0])}" for rank, wrapped in by_rank[:_SHOWN]]
    more = [f"and {len(by_rank) - _SHOWN} more ranks"] if len(by_rank) > _SHOWN else []
    return "\n".join(said + more)


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
