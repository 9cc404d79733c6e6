"""What every module of a model took and gave on one microbatch, and the first one that is to blame for a difference.

Hooks keep the inputs and outputs of each module, and the gradients of both, for the first microbatch of the first step.
On a layout they are the rank's own parts: a tensor of the reference's shape is held whole, one that is an equal share
of it in one dim is this rank's piece along tp (of the sequence, of heads, of features, of the vocabulary). What fits
neither cannot be compared and blames nobody.

A module is to blame in the forward when what it took is right and what it gave is wrong; in the backward when the
gradient of its output is right and the one that it sends to its input is wrong. A wrong value that the module around it
puts right (a partial sum that is reduced there) is no fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megastack.batch import Microbatch


@dataclass
class Seen:
    """The tensors of one call, by their place among the arguments or results."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    input_gradients: dict[int, Tensor] = field(default_factory=dict)
    output_gradients: dict[int, Tensor] = field(default_factory=dict)


ModuleTrace = dict[str, Seen]
"""By module name, in the order in which the calls ended."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands on the tensor axis."""

    rank: int
    size: int


@dataclass(frozen=True)
class Fault:
    """A module that is to blame, as one rank sees it.

    Attributes:
        module: its global name.
        order: its place in the forward of the reference.
        side: ``forward`` or ``backward``.
        relative: the largest difference over the largest element of the reference.
        actual: the output, or the gradient of an input, on this rank.
        expected: the reference's, cut as this rank's is.
        proven: whether what it took in is right, so that the fault is its own.
    """

    module: str
    order: int
    side: str
    relative: float
    actual: Tensor
    expected: Tensor
    proven: bool


class ModuleTracer:
    """Watches stages and keeps a trace of chosen microbatches of the first step.

    Args:
        stages: modules called as ``stage(carry, microbatch)``.
        samples: the first global sample numbers of the microbatches to keep.

    Attributes:
        traces: by first sample number.
        vectors: one-dimensional parameters by global name, as the watched microbatches used them. Under ZeRO 2 and 3 a
            parameter is whole only while its module is at work.
    """

    def __init__(self, stages: Sequence[nn.Module], samples: Sequence[int]) -> None:
        self.traces: dict[int, ModuleTrace] = {sample: {} for sample in samples}
        self._now: ModuleTrace | None = None
        self._open: dict[str, Seen] = {}
        self.vectors: dict[str, Tensor] = {}
        for stage in stages:
            stage.register_forward_pre_hook(self._start)
            for name, module in stage.named_modules():
                if name:
                    module.register_forward_pre_hook(partial(self._before, name))
                    module.register_forward_hook(partial(self._after, name))

    @property
    def running(self) -> str:
        """The innermost module whose call has not ended; empty if there is none."""
        return next(reversed(self._open), "")

    def _start(self, stage: nn.Module, arguments: tuple[Any, ...]) -> None:
        microbatch = next(value for value in arguments if isinstance(value, Microbatch))
        first = microbatch.step == 0 and torch.is_grad_enabled()
        self._now = self.traces.get(int(microbatch.samples_B[0])) if first else None

    def _before(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep the inputs, and hand the module its own alias of each, so that a gradient is that of this use alone."""
        if self._now is None or name in self._now:
            return None
        for own, parameter in module.named_parameters(name, recurse=False):
            if parameter.dim() == 1:
                self.vectors[own] = parameter.detach().clone()
        seen = self._open[name] = Seen()
        given = list(arguments)
        for place, value in enumerate(arguments):
            if isinstance(value, Tensor):
                seen.inputs[place] = value.detach().clone()
                if value.requires_grad:
                    given[place] = value.view_as(value)
                    given[place].register_hook(_keeper(seen.input_gradients, place))
        return tuple(given)

    def _after(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        seen = self._open.pop(name, None)
        if self._now is None or seen is None:
            return
        for place, value in enumerate(output if isinstance(output, tuple | list) else [output]):
            if isinstance(value, Tensor):
                seen.outputs[place] = value.detach().clone()
                if value.requires_grad:
                    value.register_hook(_keeper(seen.output_gradients, place))
        self._now[name] = seen


def _keeper(store: dict[int, Tensor], place: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        store[place] = gradient.detach().clone()

    return keep


def find_faults(expected: ModuleTrace, actual: ModuleTrace, place: Place, tolerance: float) -> list[Fault]:
    """The first module to blame in the forward, and the first in the backward, as far as there are any.

    Args:
        expected: of the same microbatch on one rank.
        actual: of this rank.
        place: this rank's.
        tolerance: the relative difference that rounding may make.
    """
    judge = _Judge(expected, actual, place, tolerance)
    return [*judge.forward(), *judge.backward()]


def find_reshaped(expected: ModuleTrace, actual: ModuleTrace, composed: Collection[str]) -> str | None:
    """What to say of the first composed module that keeps the shape of its input on one rank, and does not here."""
    for name, seen in actual.items():
        whole = expected.get(name)
        if (
            whole is None
            or name not in composed
            or not all(0 in x for x in (seen.inputs, seen.outputs, whole.inputs, whole.outputs))
        ):
            continue
        taken, given = tuple(seen.inputs[0].shape), tuple(seen.outputs[0].shape)
        if taken != given and whole.inputs[0].shape == whole.outputs[0].shape:
            return f"{name} gives {given} for an input of {taken}; on one rank they are of one shape"
    return None


class _Judge:
    def __init__(self, expected: ModuleTrace, actual: ModuleTrace, place: Place, tolerance: float) -> None:
        self.expected, self.actual, self.place, self.tolerance = expected, actual, place, tolerance
        self.names = [name for name in expected if name in actual]
        self.order = {name: at for at, name in enumerate(expected)}

    def forward(self) -> Iterator[Fault]:
        wrong = [name for name in self.names if self._worst(name, "outputs") and not self._put_right(name)]
        blamed = [name for name in wrong if not self._worst(name, "inputs")] or wrong
        if blamed:
            yield self._fault(blamed[0], "forward", "outputs")

    def backward(self) -> Iterator[Fault]:
        """The innermost module around the first break, seen from the loss."""
        broken = [
            name
            for name in reversed(self.names)
            if self._worst(name, "input_gradients") and not self._worst(name, "output_gradients")
        ]
        if broken:
            name = broken[0]
            while inner := [other for other in broken if other != name and _inside(other, name)]:
                name = inner[0]
            yield self._fault(name, "backward", "input_gradients")

    def _fault(self, name: str, side: str, what: str) -> Fault:
        found = self._worst(name, what)
        assert found is not None
        relative, actual, expected = found
        before = "inputs" if side == "forward" else "output_gradients"
        return Fault(name, self.order[name], side, relative, actual, expected, not self._worst(name, before))

    def _put_right(self, name: str) -> bool:
        around = [other for other in self.names if other != name and _inside(name, other)]
        return any(self._comparable(other) and not self._worst(other, "outputs") for other in around)

    def _comparable(self, name: str) -> bool:
        return any(True for _ in self._pairs(name, "outputs"))

    def _worst(self, name: str, what: str) -> tuple[float, Tensor, Tensor] | None:
        """The tensor that differs most beyond the tolerance: how much, it, and what it should be."""
        wrong = [(off, a, e) for off, a, e in self._pairs(name, what) if not off <= self.tolerance]
        return max(wrong, key=lambda found: found[0]) if wrong else None

    def _pairs(self, name: str, what: str) -> Iterator[tuple[float, Tensor, Tensor]]:
        whole: Mapping[int, Tensor] = getattr(self.expected[name], what)
        for at, x in getattr(self.actual[name], what).items():
            piece = share_of(whole[at], x.shape, self.place) if at in whole else None
            if piece is not None and x.numel():
                yield relative_difference(piece, x, whole[at]), x, piece


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(outer + ".")


def relative_difference(expected: Tensor, actual: Tensor, whole: Tensor) -> float:
    """The largest difference over the largest element of the whole reference; infinite where one is not finite."""
    difference = float((actual.double() - expected.double()).abs().max())
    peak = float(whole.double().abs().max())
    return difference / max(peak, 1e-300) if difference == difference else float("inf")


def share_of(whole: Tensor, shape: Sequence[int], place: Place) -> Tensor | None:
    """What a rank of the tensor axis holds of a tensor, by the local shape: all of it, or its share of one dim.

    Adjacent ranks hold the same share where there are fewer shares than ranks. None if the shape is neither.
    """
    if tuple(whole.shape) == tuple(shape):
        return whole
    cut = [dim for dim, (a, b) in enumerate(zip(whole.shape, shape, strict=False)) if a != b]
    if whole.dim() != len(shape) or len(cut) != 1:
        return None
    dim, size = cut[0], shape[cut[0]]
    shares = whole.shape[dim] // size if size and whole.shape[dim] % size == 0 else 0
    if not shares or place.size % shares:
        return None
    return whole.narrow(dim, place.rank // (place.size // shares) * size, size)
