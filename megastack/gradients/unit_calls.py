"""Units that one rank calls and another does not: a skipped one takes part in every gather and reduction all the same.

FSDP2 gathers a unit when it is called and reduces its gradients behind its backward. A branch that depends on the data
may leave a unit out on some ranks, which would then start other collectives than the rest. Here such a unit is passed
through as if it were the identity: FSDP2's own hooks for it run on the tensors that go to the next unit, so its gather
and its reduction, of zeros, come where they come on the other ranks. A unit that is called but uses no parameter, where
nothing before it is trained, gets an output that requires a gradient, for the same reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megastack.errors import PlacementError
from megastack.torch_private import after_forward, before_forward


class UnitCalls:
    """Watches the forwards of a stage whose units were cut by ``fully_shard``.

    Args:
        stage: the stage; it is called for every microbatch.
        units: its units in the order of their use.
    """

    def __init__(self, stage: nn.Module, units: Sequence[nn.Module]) -> None:
        self._units = units
        self._next = len(units)
        stage.register_forward_pre_hook(self._begin, prepend=True)
        if _is_trained(stage):
            stage.register_forward_hook(_require_gradient, prepend=True)
        stage.register_forward_hook(self._end, prepend=True)  # runs before the one above, and both before FSDP2's
        for at, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._before, at), prepend=True, with_kwargs=True)
            if _is_trained(unit):
                unit.register_forward_hook(_require_gradient, prepend=True)

    def _begin(self, stage: nn.Module, args: Any) -> None:
        self._next = 0

    def _before(self, at: int, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        skipped = self._units[self._next : at]
        self._next = max(self._next, at + 1)
        return _passed(skipped, (args, kwargs))

    def _end(self, stage: nn.Module, args: Any, output: Any) -> Any:
        skipped = self._units[self._next :]
        self._next = len(self._units)
        (output,), _ = _passed(skipped, ((output,), {}))
        return output


def require_calls(part: nn.Module, inner: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> None:
    """Have a part fail that does not call one of the units inside of it, which it uses in no certain order.

    Args:
        part: a stage or a unit.
        inner: what is cut inside of it, and gathered with it.
        names: the global name of each module.

    Raises:
        PlacementError: later, in the part's forward and on the rank that skips the unit.
    """
    called: set[nn.Module] = set()

    def end(part: nn.Module, args: Any, output: Any) -> None:
        missing = [names[unit] for unit in inner if unit not in called]
        called.clear()
        if missing:
            raise PlacementError(
                f"{', '.join(missing)}: not called in this forward; a module whose dtype differs from the rest "
                "of its block (precision.keep_fp32) must be called on every data rank under parallel.zero.stage 2 and "
                "3; use stage 1, or let precision.keep_fp32 match the whole block or nothing of it"
            )

    for unit in inner:
        unit.register_forward_pre_hook(lambda unit, args: called.add(unit))
        if _is_trained(unit):
            unit.register_forward_hook(_require_gradient, prepend=True)
    if inner:
        part.register_forward_hook(end, prepend=True)


def _is_trained(unit: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in unit.parameters())


def _passed(units: Sequence[nn.Module], value: tuple[Any, Any]) -> tuple[Any, Any]:
    """Arguments after they went through units that do nothing."""
    for unit in units:
        value = before_forward(unit, *value)
        if _is_trained(unit):
            value = _with_gradient(value)
        value = after_forward(unit, value)
    return value


def _require_gradient(unit: nn.Module, args: Any, output: Any) -> Any:
    return _with_gradient(output)


def _with_gradient(value: Any) -> Any:
    """The same values, of which one tensor requires a gradient where a gradient is wanted and none did."""
    tensors = _tensors(value)
    if not torch.is_grad_enabled() or any(x.requires_grad for x in tensors):
        return value
    chosen = next((x for x in tensors if x.is_floating_point()), None)
    if chosen is None:
        return value
    return _replaced(value, chosen, _Attach.apply(chosen, torch.empty(0, requires_grad=True)))


class _Attach(torch.autograd.Function):
    """A tensor as the result of something that is trained; no gradient leaves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for part in _parts(value) for x in _tensors(part)]


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return list(value.values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    return ()


def _replaced(value: Any, old: Tensor, new: Tensor) -> Any:
    if value is old:
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(part, old, new) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(_replaced(part, old, new) for part in value)
    if isinstance(value, dict):
        return {name: _replaced(part, old, new) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: _replaced(getattr(value, field.name), old, new) for field in fields(value)}
        return replace(value, **parts) if any(parts[n] is not getattr(value, n) for n in parts) else value
    return value
