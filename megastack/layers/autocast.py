"""``torch.autocast`` for custom autograd functions.

Autocast acts on each torch operation when it is called. A ``torch.autograd.Function`` that calls several operations
would mix dtypes in its backward, which usually runs without autocast. Operands are therefore cast before they enter
such a function, by operations that autograd records, and autocast is off inside the function in both directions.
Gradients then have the dtypes of the inputs, as with torch's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as torchs_once_differentiable

from megastack.torch_private import are_transforms_active, is_any_autocast_enabled

_Method = TypeVar("_Method", bound=Callable[..., Any])
_UNCHANGED = nullcontext()


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with ``x``: autocast's if it is on and applies to ``x``, else ``x.dtype``."""
    if (
        not is_any_autocast_enabled()
        or not is_on(x.device.type)
        or not x.is_floating_point()
        or x.dtype == torch.float64
    ):
        return x.dtype
    return torch.get_autocast_dtype(x.device.type)


def is_on(device_type: str) -> bool:
    """Whether autocast is on for this type of device."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def autocast_off(x: Tensor) -> AbstractContextManager[Any]:
    """Turn autocast off for the device of ``x``."""
    if not is_any_autocast_enabled() or not is_on(x.device.type):
        return _UNCHANGED
    return torch.autocast(x.device.type, enabled=False)


class Function(torch.autograd.Function):
    """An autograd function whose forward runs with autocast off, and whose call costs the host less than usual.

    It enters torch's C++ code directly. torch first looks in Python for tensors that a transform of ``torch.func`` left
    behind, which takes as long as an operation. Decorate the backward with :func:`in_own_dtypes`, or with
    :func:`once_differentiable` if it cannot be differentiated.
    """

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """Run the forward and record it."""
        if is_any_autocast_enabled() or are_transforms_active():
            with autocast_off(next(value for value in arguments if isinstance(value, Tensor))):
                return super().apply(*arguments)
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]


def in_own_dtypes(function: _Method) -> _Method:
    """Decorate the ``backward`` of a :class:`Function` to run with autocast off."""

    @wraps(function)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if not is_any_autocast_enabled():
            return function(ctx, *grads)
        first = next((grad for grad in grads if grad is not None), None)
        with nullcontext() if first is None else autocast_off(first):
            return function(ctx, *grads)

    return cast("_Method", run)


def once_differentiable(function: _Method) -> _Method:
    """Decorate a ``backward`` like torch's function of this name, to run with autocast off as well.

    A usual backward calls it directly: entering torch's contexts takes as long as an operation.
    """
    checked = torchs_once_differentiable(in_own_dtypes(function))

    @wraps(function)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() or is_any_autocast_enabled():
            return checked(ctx, *grads)
        return function(ctx, *grads)

    return cast("_Method", run)


@dataclass(frozen=True)
class AutocastState:
    """A recorded state of autocast, to restore later.

    Args:
        devices: for each type of device, whether autocast is on, and its dtype.
        cache: whether casts of weights are cached.
    """

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @staticmethod
    def now(tensors: Sequence[Tensor]) -> AutocastState:
        """The current state for the CPU and the devices of these tensors."""
        types = sorted({"cpu", *(x.device.type for x in tensors)})
        known = [kind for kind in types if torch.amp.is_autocast_available(kind)]
        devices = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in known)
        return AutocastState(tuple(devices), torch.is_autocast_cache_enabled())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the recorded state inside the context."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.devices:
                if enabled or is_on(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            yield
