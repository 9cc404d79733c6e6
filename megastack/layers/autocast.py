"""``torch.autocast`` for functions of our own.

Autocast acts on torch's operations one by one, where they are called. A ``torch.autograd.Function`` that calls several
gets operands of unlike dtypes in its backward, which runs under the state of whoever calls it: usually none. So
operands are cast before they enter such a function, by operations that autograd knows, and inside of it autocast is off
in both directions. Gradients then have the dtypes of what was given, as with torch's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Method = TypeVar("_Method", bound=Callable[..., Any])


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with ``x``: autocast's where that is on and changes such a tensor, else its own."""
    if not is_on(x.device.type) or not x.is_floating_point() or x.dtype == torch.float64:
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def is_on(device_type: str) -> bool:
    """Whether autocast is on here for tensors on such a device."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def autocast_off(x: Tensor) -> AbstractContextManager[Any]:
    """Operations on tensors like ``x`` compute in the dtypes of their operands."""
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if is_on(device_type) else nullcontext()


def in_own_dtypes(function: _Method) -> _Method:
    """A ``forward`` or ``backward`` of a ``torch.autograd.Function`` with autocast off inside."""

    @wraps(function)
    def run(ctx: Any, *values: Any) -> Any:
        first = next((value for value in values if isinstance(value, Tensor)), None)
        with nullcontext() if first is None else autocast_off(first):
            return function(ctx, *values)

    return cast("_Method", run)


@dataclass(frozen=True)
class AutocastState:
    """The state of autocast at some moment, to run something under it later.

    Args:
        devices: for each type of device, whether it is on, and its dtype.
        cache: whether casts of weights are remembered.
    """

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def now(tensors: Sequence[Tensor]) -> AutocastState:
        """The state for the CPU and the devices of these tensors."""
        types = sorted({"cpu", *(x.device.type for x in tensors)})
        known = [kind for kind in types if torch.amp.is_autocast_available(kind)]
        devices = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in known)
        return AutocastState(tuple(devices), torch.is_autocast_cache_enabled())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """That state inside."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.devices:
                if enabled or is_on(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            yield
