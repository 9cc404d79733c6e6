"""Activation recompute: drop the tensors that a part of the model saves for backward, and run its forward again there.

:func:`recompute` runs a function and keeps only its inputs. When backward needs the first tensor that the function
saved, the function runs again, up to its last saved tensor; the rest (a block's down projection and its reduction) is
not repeated. Each recomputed tensor is freed when backward has used it.

Collectives inside the function run again too, in the same order and at the same point of backward on every rank of a
tensor-parallel group. Dropout is a function of the microbatch (:mod:`megastack.layers.dropout`), so its masks repeat.
torch's random generators and ``torch.autocast`` are restored for the second run, and buffers of the recomputed module
are updated only by the first (:class:`BufferCopies`). If the function itself computes gradients, it runs again at that
point, up to the current operation, and the tensors saved by then are kept. The second run sees ``context.recomputing``,
so that side effects such as counters happen only in the first. A second run that saves different tensors raises an
error.

:func:`recompute_blocks_` selects the modules. It replaces the class of each by one of the same name whose ``forward``
(or ``attend``) is recomputed, as FSDP does. Parameters, their names and users' classes do not change.

The mechanism is the same as in non-reentrant ``torch.utils.checkpoint``: hooks on saved tensors, and an early stop. In
a compiled block, which has no such hooks, :func:`recompute` is torch's function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megastack.errors import ConfigError, MegastackError
from megastack.layers.attention import ParallelAttention
from megastack.layers.autocast import AutocastState
from megastack.layers.context import Context
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear
from megastack.torch_private import buffers_of, version_of
from megastack.weight_gradients import current_scope, entered

EVERY_BLOCK = r"blocks\.\d+"


def recompute_blocks_(blocks: Mapping[str, nn.Module], mode: str, pattern: str | None, *, layers: int) -> None:
    """Select the modules of a stage's blocks that backward recomputes.

    Args:
        blocks: the blocks by global layer number.
        mode: ``none``; ``selective`` (``attend`` of each attention layer); ``full`` (each block); ``pattern``.
        pattern: for ``pattern``, a regular expression that matches the whole global name of each module to recompute,
            such as ``blocks\\.\\d+\\.mlp``. Modules inside one that matches are recomputed with it.
        layers: the number of blocks of the whole model.

    Raises:
        ConfigError: no module in these blocks is selected, or a linear layer is selected, which its parent need not
            call.
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
        module.__class__ = _recomputed(type(module), method)  # type: ignore[arg-type]  # a class is hashable


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
    """A stage may have no match, but the model must have one; the blocks of all stages have the same modules."""
    for name, module in chosen.items():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            raise ConfigError(
                f"recompute.pattern={pattern}: {name} is a linear layer, which saves only its input; "
                f"use the layer it belongs to, {name.rpartition('.')[0]}"
            )
    inner = {name.split(".", 2)[2] for name, _ in _named(blocks) if name.count(".") > 1}
    every = [f"blocks.{layer}{part}" for layer in range(layers) for part in ("", *(f".{name}" for name in inner))]
    if not chosen and not any(re.fullmatch(pattern, name) for name in every):
        raise ConfigError(
            f"recompute.pattern={pattern}: matches the whole name of no module; "
            r"use for example blocks\.(0|2), blocks\.\d+\.mlp or blocks\.\d+\.attention"
        )


@cache
def _recomputed(kind: type[nn.Module], method: str) -> type[nn.Module]:
    """A subclass with one method that backward recomputes; one for all modules, whose compiled code is then shared."""
    original = getattr(kind, method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recompute(partial(original, self), *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {method: run, **names})


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` and keep only its tensor arguments for backward.

    Raises:
        MegastackError: in backward, if the second run does not save the same tensors as the first.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler divides the block's graph by itself
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    call = _Call(function, args, kwargs)
    with saved_tensors_hooks(call.drop, call.restore):
        result = function(*args, **kwargs)
    call.generators.drop_if_unused()
    return result


class _Placeholder:
    """Represents a dropped tensor in the graph, and holds it once it is recomputed.

    Backward frees it, and the tensor with it, after the operation that saved the tensor.
    """

    __slots__ = ("__weakref__", "dtype", "shape", "tensor")

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.tensor: Tensor | None = None


class _StopRecompute(Exception):
    """Raised to stop a second run; not an error."""


class _Call:
    """A function, its arguments, and the placeholders of its saved tensors; the graph owns it through its hooks.

    Autograd saves the tensor arguments: hooks of an enclosing recomputed call see them and may drop them in turn.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.function = function
        self.names = tuple(kwargs)
        values = (*args, *kwargs.values())
        tensors = [x for x in values if isinstance(x, Tensor)]
        self.others = [_TENSOR if isinstance(x, Tensor) else x for x in values]
        self.inputs = _SaveInputs.apply(torch.empty(0, requires_grad=True), *tensors)
        self.generators = _GeneratorStates(tensors)
        self.buffers = BufferCopies(function)
        self.autocast = AutocastState.now(tensors)
        self.scope = current_scope()
        self.placeholders: list[ref[_Placeholder]] = []

    def drop(self, x: Tensor) -> _Placeholder:
        placeholder = _Placeholder(x)
        self.placeholders.append(ref(placeholder))
        return placeholder

    def restore(self, placeholder: _Placeholder) -> Tensor:
        if placeholder.tensor is None:
            self._run_again()
        if placeholder.tensor is None:
            raise self._mismatch("fewer tensors")
        return placeholder.tensor

    def _run_again(self) -> None:
        remaining = iter(self.placeholders)
        left = len(self.placeholders)

        def take(x: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            placeholder, kept = next(remaining)(), x.detach()
            if placeholder is not None:
                if (placeholder.shape, placeholder.dtype) != (x.shape, x.dtype):
                    raise self._mismatch(f"a tensor {tuple(x.shape)} where it had saved {tuple(placeholder.shape)}")
                placeholder.tensor = kept
            if not left:
                raise _StopRecompute
            return kept

        args, kwargs = self._arguments()
        hooks = saved_tensors_hooks(take, _as_saved)
        before = self.generators.restored(), self.buffers.restored(), self.autocast.restored()
        with before[0], before[1], before[2], entered(self.scope), suppress(_StopRecompute), torch.enable_grad(), hooks:
            self.function(*args, **kwargs)

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        tensors = (x.detach().requires_grad_(x.requires_grad) for x in self.inputs.grad_fn.saved_tensors)
        values = [next(tensors) if x is _TENSOR else _marked(x) for x in self.others]
        positional = len(values) - len(self.names)
        return values[:positional], dict(zip(self.names, values[positional:], strict=True))

    def _mismatch(self, what: str) -> MegastackError:
        function = self.function.func if isinstance(self.function, partial) else self.function
        name = getattr(function, "__qualname__", str(function))
        return MegastackError(
            f"recompute: {name} saved {what} when it ran for the second time; a layer that is recomputed must do the "
            "same with the same input. Leave it out with recompute.mode=pattern"
        )


_TENSOR = object()
"""Marks the position of a tensor among the arguments."""


def _marked(x: Any) -> Any:
    return replace(x, recomputing=True) if isinstance(x, Context) else x


def _as_saved(x: Tensor) -> Tensor:
    """A tensor of the second run, for gradients that the function itself computes; no other backward uses it."""
    return x


class _SaveInputs(torch.autograd.Function):
    """Saves tensors for a backward that never runs; ``first`` ensures that there is a node to hold them."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise AssertionError("nothing is computed from this")


class _GeneratorStates:
    """The states of torch's random generators before the first run, kept only if that run drew from them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.cuda = next((x.device for x in tensors if x.device.type == "cuda"), None)
        self.before: list[Tensor] | None = self._states()

    def _states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([] if self.cuda is None else [torch.cuda.get_rng_state(self.cuda)])]

    def _set(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.cuda is not None:
            torch.cuda.set_rng_state(states[1], self.cuda)

    def drop_if_unused(self) -> None:
        assert self.before is not None
        if all(map(torch.equal, self.before, self._states())):
            self.before = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        if self.before is None:
            yield
            return
        now = self._states()
        self._set(self.before)
        try:
            yield
        finally:
            self._set(now)


_COPIES = "_recompute_copies"
"""The attribute of a module that holds the last copy of each of its buffers, with the buffer and its version."""


class BufferCopies:
    """The values of a module's buffers at the time of the first run, on which the second run operates.

    A layer may update a buffer in its forward (a running mean). The second run must not update it again, nor read
    values that the first run or later microbatches have written. An unchanged buffer is copied once; changes are
    detected by torch's version counter, which does not see writes through ``.data``.

    Args:
        function: a method of the module bound with ``functools.partial``; any other function has no buffers.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        owner = function.args[0] if isinstance(function, partial) and function.args else None
        modules = owner.modules() if isinstance(owner, nn.Module) else ()
        self._copies = [
            (module, name, _copy_of(module, name, buffer))
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Replace the module's buffers with copies of the recorded values inside the context."""
        now = [(module, name, buffers_of(module)[name]) for module, name, _ in self._copies]
        for module, name, copy in self._copies:
            buffers_of(module)[name] = copy.clone()
        try:
            yield
        finally:
            for module, name, buffer in now:
                buffers_of(module)[name] = buffer


def _copy_of(module: nn.Module, name: str, buffer: Tensor) -> Tensor:
    """The last copy of a buffer if the buffer has not changed since, else a new one."""
    copies: dict[str, tuple[ref[Tensor], int, Tensor]] = module.__dict__.setdefault(_COPIES, {})
    last = copies.get(name)
    if last is None or last[0]() is not buffer or last[1] != version_of(buffer):
        last = copies[name] = ref(buffer), version_of(buffer), buffer.detach().clone()
    return last[2]
