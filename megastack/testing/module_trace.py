"""What every module of a model took and gave on chosen microbatches, recorded by hooks.

Hooks keep the inputs and outputs of each module, and the gradients of both. On a layout they are the rank's own parts:
a tensor of the reference's shape is held whole, one that is an equal share of it in one dim is this rank's piece along
tp (of the sequence, of heads, of features, of the vocabulary). What fits neither cannot be compared.

:mod:`megastack.testing.blame` compares two such traces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megastack.batch import Microbatch

TensorKey = int | str
"""The place of a tensor among arguments or results: a position or a keyword, with the keys inside a container."""


@dataclass
class Seen:
    """The tensors of one call by their slot."""

    inputs: dict[TensorKey, Tensor] = field(default_factory=dict)
    outputs: dict[TensorKey, Tensor] = field(default_factory=dict)
    input_gradients: dict[TensorKey, Tensor] = field(default_factory=dict)
    output_gradients: dict[TensorKey, Tensor] = field(default_factory=dict)
    differentiated: bool = False


ModuleTrace = dict[str, Seen]
"""By module name, in the order in which the calls ended."""


@dataclass(frozen=True)
class Place:
    """The coordinate of a rank on the tensor axis."""

    rank: int
    size: int


def slots(values: Iterable[tuple[TensorKey, Any]]) -> Iterator[tuple[TensorKey, Tensor]]:
    """The tensors among values, those inside of tuples, lists and mappings included."""
    for slot, value in values:
        if isinstance(value, Tensor):
            yield slot, value
        elif isinstance(value, tuple | list):
            yield from slots((f"{slot}.{at}", item) for at, item in enumerate(value))
        elif isinstance(value, Mapping):
            yield from slots((f"{slot}.{key}", item) for key, item in value.items())


def output_slots(output: Any) -> Iterator[tuple[TensorKey, Tensor]]:
    """The tensors of a result; a tuple or list is the results themselves."""
    return slots(enumerate(output if isinstance(output, tuple | list) else [output]))


class Recorder:
    """Hooks on modules that record the first call of each into a trace.

    Args:
        modules: modules by name.

    Attributes:
        trace: where calls are recorded; None records nothing.
        vectors: one-dimensional parameters by global name, as the recorded calls used them. Under ZeRO 2 and 3 a
            parameter is whole only while its module is at work.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.trace: ModuleTrace | None = None
        self.vectors: dict[str, Tensor] = {}
        self._open: dict[str, Seen] = {}
        for name, module in modules:
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(partial(self._after, name))

    @property
    def running(self) -> tuple[str, ...]:
        """The modules whose call has not ended, outermost first."""
        return tuple(self._open)

    def _before(
        self, name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Record the inputs, and hand the module its own alias of each, so that a gradient belongs to this use alone.

        A recomputed call is recorded once, and gets aliases each time, since it must do the same each time. Its
        gradients come with the call that autograd sees.
        """
        if self.trace is None:
            return None
        seen = self.trace.get(name)
        if seen is None:
            seen = Seen(dict(_copies(slots([*enumerate(arguments), *named.items()]))))
            for own, parameter in module.named_parameters(name):  # a part may be used without being called
                if parameter.dim() == 1 and own not in self.vectors and not isinstance(parameter, DTensor):
                    self.vectors[own] = parameter.detach().clone()
        elif not torch.is_grad_enabled():
            return None
        again = seen.differentiated
        if not again:
            self._open[name] = seen
        if not torch.is_grad_enabled():
            return None
        alias = partial(_alias, store={} if again else seen.input_gradients)
        return tuple(alias(at, x) for at, x in enumerate(arguments)), {key: alias(key, x) for key, x in named.items()}

    def _after(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        seen = self._open.pop(name, None)
        if self.trace is None or seen is None:
            return
        seen.outputs = seen.outputs or dict(_copies(output_slots(output)))
        seen.differentiated = torch.is_grad_enabled()
        for slot, value in output_slots(output):
            if value.requires_grad:
                value.register_hook(_keeper(seen.output_gradients, slot))
        self.trace.setdefault(name, seen)


def _copies(values: Iterable[tuple[TensorKey, Tensor]]) -> Iterator[tuple[TensorKey, Tensor]]:
    return ((slot, value.detach().clone()) for slot, value in values)


def _alias(slot: TensorKey, value: Any, *, store: dict[TensorKey, Tensor]) -> Any:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    alias = value.view_as(value)
    alias.register_hook(_keeper(store, slot))
    return alias


def _keeper(store: dict[TensorKey, Tensor], slot: TensorKey) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        store[slot] = gradient.detach().clone()

    return keep


class ModuleTracer:
    """Records chosen microbatches of the first step of a training.

    Args:
        stages: modules called as ``stage(carry, microbatch)``.
        samples: the first global sample numbers of the microbatches to record.

    Attributes:
        traces: by first sample number.
        recorder: its hooks.
    """

    def __init__(self, stages: Sequence[nn.Module], samples: Sequence[int]) -> None:
        self.traces: dict[int, ModuleTrace] = {sample: {} for sample in samples}
        for stage in stages:
            stage.register_forward_pre_hook(self._start)
        self.recorder = Recorder((name, x) for stage in stages for name, x in stage.named_modules() if name)

    def _start(self, stage: nn.Module, arguments: tuple[Any, ...]) -> None:
        microbatch = next(value for value in arguments if isinstance(value, Microbatch))
        first = microbatch.step == 0 and torch.is_grad_enabled()
        self.recorder.trace = self.traces.get(int(microbatch.samples_B[0])) if first else None


def find_reshaped(
    expected: ModuleTrace, actual: ModuleTrace, composed: Collection[str]
) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """The first composed module that keeps the shape of its input on one rank and does not here, and both shapes."""
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
            return name, taken, given
    return None


def relative_difference(expected: Tensor, actual: Tensor, whole: Tensor) -> float:
    """The largest difference over the largest element of the whole reference; infinite where one is not finite."""
    difference = float((actual.detach().double() - expected.detach().double()).abs().max())
    peak = float(whole.detach().double().abs().max())
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
