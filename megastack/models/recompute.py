"""Activation recompute: forget what a part of the model saved for backward, and run its forward again to get it back.

:func:`recompute` runs a function and keeps only the tensors it was given. When backward first asks for one that the
function saved, the function runs once more, up to the last tensor that was saved: what comes after it (a block's down
projection and its reduction) is not done again. Tensors found again go one by one as backward uses them up.

Collectives inside run again too, in the order of the first time and at the same point of backward on every rank of a
tensor-parallel group. Dropout is a function of the microbatch (:mod:`megastack.layers.dropout`) and repeats itself; a
layer that draws from torch's generator finds it as it was, ``torch.autocast`` is on where it was on, and a layer that
updates a buffer of the recomputed module updates it once (:mod:`megastack.models.kept_buffers`). A function that takes
gradients itself runs again there and then, up to where it is, and what it had saved by then is kept from there on. The
second run sees ``context.recomputing``, so that side effects such as counters can be left to the first. A second run
that saves other tensors than the first is an error.

:func:`recompute_blocks_` chooses the parts. It gives their modules a class of the same name whose ``forward`` (or
``attend``) is recomputed, as FSDP does with its own; parameters, their names and users' classes stay what they are.

The means are those of ``torch.utils.checkpoint`` without reentrance: hooks on saved tensors, and an early stop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megastack.errors import ConfigError, MegastackError
from megastack.layers.attention import ParallelAttention
from megastack.layers.autocast import AutocastState
from megastack.layers.context import Context
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear
from megastack.models.kept_buffers import KeptBuffers
from megastack.weight_gradients import current_scope, entered

EVERY_BLOCK = r"blocks\.\d+"


def recompute_blocks_(blocks: Mapping[str, nn.Module], mode: str, pattern: str | None, *, layers: int) -> None:
    """Choose what the blocks of a stage compute again in backward.

    Args:
        blocks: the blocks by global layer number.
        mode: ``none``; ``selective`` (``attend`` of each attention layer); ``full`` (each block); ``pattern``.
        pattern: for ``pattern``, a regular expression that matches the whole global name of each module to recompute,
            such as ``blocks\\.\\d+\\.mlp``. Modules inside of one that matches are recomputed with it.
        layers: the number of blocks of the whole model.

    Raises:
        ConfigError: the choice is nothing in these blocks, or a linear layer, which its parent may not even call.
    """
    if mode == "none" or not blocks:
        return
    chosen: dict[str, nn.Module]
    if mode == "selective":
        chosen = {n: m for n, m in _named(blocks) if isinstance(m, ParallelAttention)}
        _check_attention(blocks, chosen)
    else:
        pattern = EVERY_BLOCK if mode == "full" else pattern or ""
        chosen = _matching(blocks, pattern)
        _check_pattern(blocks, chosen, pattern, layers)
    method = "attend" if mode == "selective" else "forward"
    for module in chosen.values():
        module.__class__ = _recomputed(type(module), method)


def _named(blocks: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for layer, block in blocks.items():
        yield from block.named_modules(prefix=f"blocks.{layer}")


def _matching(blocks: Mapping[str, nn.Module], pattern: str) -> dict[str, nn.Module]:
    """The outermost modules whose whole name matches."""
    chosen: dict[str, nn.Module] = {}
    for name, module in _named(blocks):
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if not inside and re.fullmatch(pattern, name):
            chosen[name] = module
    return chosen


def _check_attention(blocks: Mapping[str, nn.Module], chosen: Mapping[str, nn.Module]) -> None:
    for layer, block in blocks.items():
        if not any(name.startswith(f"blocks.{layer}.") for name in chosen):
            raise ConfigError(
                f"recompute.mode=selective: block {layer}, a {type(block).__qualname__}, has no ParallelAttention, "
                "whose `attend` would be computed again; use none, full or pattern"
            )


def _check_pattern(blocks: Mapping[str, nn.Module], chosen: Mapping[str, nn.Module], pattern: str, layers: int) -> None:
    """A stage may well have no match; a model may not, and this stage's blocks tell what the others are like."""
    for name, module in chosen.items():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            raise ConfigError(
                f"recompute.pattern={pattern}: {name} is a linear layer, which keeps nothing but its input; "
                f"use the layer it belongs to, {name.rpartition('.')[0]}"
            )
    inner = {name.split(".", 2)[2] for name, _ in _named(blocks) if name.count(".") > 1}
    every = [f"blocks.{layer}{part}" for layer in range(layers) for part in ("", *(f".{name}" for name in inner))]
    if not chosen and not any(re.fullmatch(pattern, name) for name in every):
        raise ConfigError(
            f"recompute.pattern={pattern}: matches the whole name of no module; "
            r"use for example blocks\.(0|2), blocks\.\d+\.mlp or blocks\.\d+\.attention"
        )


def _recomputed(kind: type[nn.Module], method: str) -> type[nn.Module]:
    """A subclass, alike but for one method that is computed again in backward."""
    original = getattr(kind, method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recompute(partial(original, self), *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {method: run, **names})


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which only the tensors it is given are kept for backward.

    Raises:
        MegastackError: in backward, when the second run does not save the tensors that the first one did.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = _Call(function, args, kwargs)
    with saved_tensors_hooks(call.forget, call.find):
        result = function(*args, **kwargs)
    call.generators.forget_if_unused()
    return result


class _Place:
    """Stands in the graph for a tensor that was not kept, and holds it once it is found again.

    It dies, and the tensor with it, when backward is done with the operation that saved it.
    """

    __slots__ = ("__weakref__", "dtype", "found", "shape")

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.found: Tensor | None = None


class _Done(Exception):
    """Ends a second run; no error."""


class _Call:
    """A function with its arguments, and the places of what it saved; the graph owns it through its hooks.

    Tensor arguments are saved by autograd itself: hooks outside of this call see them and may recompute them in turn.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self.names = tuple(kwargs)
        values = (*args, *kwargs.values())
        tensors = [x for x in values if isinstance(x, Tensor)]
        self.others = [_AGAIN if isinstance(x, Tensor) else x for x in values]
        self.inputs = _Keep.apply(torch.empty(0, requires_grad=True), *tensors)
        self.generators = _Generators(tensors)
        self.buffers = KeptBuffers(function)
        self.autocast = AutocastState.now(tensors)
        self.scope = current_scope()
        self.places: list[ref[_Place]] = []

    def forget(self, x: Tensor) -> _Place:
        place = _Place(x)
        self.places.append(ref(place))
        return place

    def find(self, place: _Place) -> Tensor:
        if place.found is None:
            self._run_again()
        if place.found is None:
            raise self._other("fewer tensors")
        return place.found

    def _run_again(self) -> None:
        waiting = iter(self.places)
        left = len(self.places)

        def take(x: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            place, kept = next(waiting)(), x.detach()
            if place is not None:
                if (place.shape, place.dtype) != (x.shape, x.dtype):
                    raise self._other(f"a tensor {tuple(x.shape)} where it had saved {tuple(place.shape)}")
                place.found = kept
            if not left:
                raise _Done
            return kept

        args, kwargs = self._arguments()
        hooks = saved_tensors_hooks(take, _as_kept)
        before = self.generators.as_they_were(), self.buffers.as_they_were(), self.autocast.restored()
        with before[0], before[1], before[2], entered(self.scope), suppress(_Done), torch.enable_grad(), hooks:
            self.function(*args, **kwargs)

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        tensors = (x.detach().requires_grad_(x.requires_grad) for x in self.inputs.grad_fn.saved_tensors)
        values = [next(tensors) if x is _AGAIN else _marked(x) for x in self.others]
        positional = len(values) - len(self.names)
        return values[:positional], dict(zip(self.names, values[positional:], strict=True))

    def _other(self, what: str) -> MegastackError:
        function = self.function.func if isinstance(self.function, partial) else self.function
        name = getattr(function, "__qualname__", str(function))
        return MegastackError(
            f"recompute: {name} saved {what} when it ran for the second time; a layer that is recomputed must do the "
            "same with the same input. Leave it out with recompute.mode=pattern"
        )


_AGAIN = object()
"""Where a tensor stood among the arguments."""


def _marked(x: Any) -> Any:
    return replace(x, recomputing=True) if isinstance(x, Context) else x


def _as_kept(x: Tensor) -> Tensor:
    """What a second run saved, for gradients that the function itself takes; there is no other backward through it."""
    return x


class _Keep(torch.autograd.Function):
    """Saves tensors for a backward that never comes; ``first`` makes sure that there is a node to hold them."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing is computed from this")


class _Generators:
    """torch's random generators before the first run, kept only if that run drew from them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.cuda = next((x.device for x in tensors if x.device.type == "cuda"), None)
        self.before: list[Tensor] | None = self._states()

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([] if self.cuda is None else [torch.cuda.get_rng_state(self.cuda)])]

    def _set(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.cuda is not None:
            torch.cuda.set_rng_state(states[1], self.cuda)

    def forget_if_unused(self) -> None:
        assert self.before is not None
        if all(map(torch.equal, self.before, self._states())):
            self.before = None

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        if self.before is None:
            yield
            return
        now = self._states()
        self._set(self.before)
        try:
            yield
        finally:
            self._set(now)
