"""Errors that say no more than that another rank is gone: they follow the one that tells why."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist


def is_echo(error: BaseException) -> bool:
    """Whether an error says no more than that another rank cannot be reached (any longer)."""
    return any(
        isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "gloo/" in str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
