"""The inputs and outputs of every module of a model on chosen microbatches, recorded by hooks, with their gradients.

On a parallel layout these are the rank's local tensors. A tensor of the reference's shape is whole. A tensor that is an
equal share of the reference in one dim is this rank's shard over tp: of the sequence, heads, features or vocabulary.
Tensors of any other shape cannot be compared.

:mod:`megastack.testing.localize` compares two such traces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megastack.batch import Microbatch
from megastack.mesh.shape import Axis
from megastack.placement.placement import Placement

TensorKey = int | str
"""The position of a tensor among arguments or results: an index or keyword, then the keys inside a container."""


@dataclass
class ModuleCall:
    """The tensors of one call, by :data:`TensorKey`."""

    inputs: dict[TensorKey, Tensor] = field(default_factory=dict)
    outputs: dict[TensorKey, Tensor] = field(default_factory=dict)
    input_gradients: dict[TensorKey, Tensor] = field(default_factory=dict)
    output_gradients: dict[TensorKey, Tensor] = field(default_factory=dict)
    differentiated: bool = False


ModuleTrace = dict[str, ModuleCall]
"""Calls by module name, in the order in which they ended."""


@dataclass(frozen=True)
class TPRank:
    """A rank of the tensor-parallel axis and the size of the axis."""

    rank: int
    size: int


def tensors_in(values: Iterable[tuple[TensorKey, object]]) -> Iterator[tuple[TensorKey, Tensor]]:
    """The tensors among keyed values, including those inside tuples, lists and mappings."""
    for key, value in values:
        if isinstance(value, Tensor):
            yield key, value
        elif isinstance(value, tuple | list):
            yield from tensors_in((f"{key}.{index}", item) for index, item in enumerate(value))
        elif isinstance(value, Mapping):
            yield from tensors_in((f"{key}.{inner}", item) for inner, item in value.items())


def output_tensors(output: object) -> Iterator[tuple[TensorKey, Tensor]]:
    """The tensors of a result; each element of a tuple or list is a separate result."""
    return tensors_in(enumerate(output if isinstance(output, tuple | list) else [output]))


class CallRecorder:
    """Hooks on modules that record the first call of each module into a trace.

    Args:
        modules: modules by name.

    Attributes:
        trace: the trace in which calls are recorded; nothing is recorded while it is None.
        vectors: one-dimensional parameters by global name, as the recorded calls used them. Under ZeRO levels 2 and 3 a
            parameter is whole only while its module runs.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.trace: ModuleTrace | None = None
        self.vectors: dict[str, Tensor] = {}
        self._open: dict[str, ModuleCall] = {}
        for name, module in modules:
            module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            module.register_forward_hook(partial(self._after, name))

    @property
    def running(self) -> tuple[str, ...]:
        """The modules whose call has not ended, outermost first."""
        return tuple(self._open)

    def replicated_vectors(self, placements: Mapping[str, Placement]) -> dict[str, Tensor]:
        """The recorded vectors that are replicated over tp."""
        return {
            name: x for name, x in self.vectors.items() if name in placements and Axis.TP not in placements[name].shards
        }

    def _before(
        self, name: str, module: nn.Module, arguments: tuple[object, ...], named: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Record the inputs and pass the module an alias of each, so that a gradient belongs to this use only.

        A recomputed call is recorded once. It receives aliases each time, since a recomputation must repeat the first
        call exactly; its gradients are recorded with the call that autograd differentiates.
        """
        if self.trace is None:
            return None
        call = self.trace.get(name)
        if call is None:
            call = ModuleCall(dict(_copies(tensors_in([*enumerate(arguments), *named.items()]))))
            self._record_vectors(name, module)
        elif not torch.is_grad_enabled():
            return None
        again = call.differentiated
        if not again:
            self._open[name] = call
        if not torch.is_grad_enabled():
            return None
        alias = partial(_alias, store={} if again else call.input_gradients)
        return tuple(alias(at, x) for at, x in enumerate(arguments)), {key: alias(key, x) for key, x in named.items()}

    def _record_vectors(self, prefix: str, module: nn.Module) -> None:
        """Record a module's vectors, submodules included: a submodule's parameter may be used without calling it."""
        for name, parameter in module.named_parameters(prefix):
            if parameter.dim() == 1 and name not in self.vectors and not isinstance(parameter, DTensor):
                self.vectors[name] = parameter.detach().clone()

    def _after(self, name: str, module: nn.Module, arguments: tuple[object, ...], output: object) -> None:
        call = self._open.pop(name, None)
        if self.trace is None or call is None:
            return
        call.outputs = call.outputs or dict(_copies(output_tensors(output)))
        call.differentiated = torch.is_grad_enabled()
        for key, value in output_tensors(output):
            if value.requires_grad:
                value.register_hook(_gradient_hook(call.output_gradients, key))
        self.trace.setdefault(name, call)


def _copies(values: Iterable[tuple[TensorKey, Tensor]]) -> Iterator[tuple[TensorKey, Tensor]]:
    return ((key, value.detach().clone()) for key, value in values)


def _alias(key: TensorKey, value: object, *, store: dict[TensorKey, Tensor]) -> object:
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    alias = value.view_as(value)
    alias.register_hook(_gradient_hook(store, key))
    return alias


def _gradient_hook(store: dict[TensorKey, Tensor], key: TensorKey) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        store[key] = gradient.detach().clone()

    return keep


class ModuleTracer:
    """Records chosen microbatches of the first training step.

    Args:
        stages: modules called as ``stage(hidden, microbatch)``.
        samples: the first global sample numbers of the microbatches to record.

    Attributes:
        traces: the traces, by first sample number.
        recorder: the hooks.
    """

    def __init__(self, stages: Sequence[nn.Module], samples: Sequence[int]) -> None:
        self.traces: dict[int, ModuleTrace] = {sample: {} for sample in samples}
        for stage in stages:
            stage.register_forward_pre_hook(self._start)
        self.recorder = CallRecorder((name, x) for stage in stages for name, x in stage.named_modules() if name)

    def _start(self, stage: nn.Module, arguments: tuple[object, ...]) -> None:
        microbatch = next(value for value in arguments if isinstance(value, Microbatch))
        first = microbatch.step == 0 and torch.is_grad_enabled()
        self.recorder.trace = self.traces.get(int(microbatch.samples_B[0])) if first else None


def find_reshaped(
    expected: ModuleTrace, actual: ModuleTrace, composed: Collection[str]
) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """The first composed module that changes the shape of its input here but not on one rank.

    Returns:
        Its name, input shape and output shape.
    """
    for name, call in actual.items():
        whole = expected.get(name)
        if (
            whole is None
            or name not in composed
            or not all(0 in x for x in (call.inputs, call.outputs, whole.inputs, whole.outputs))
        ):
            continue
        input_shape, output_shape = tuple(call.inputs[0].shape), tuple(call.outputs[0].shape)
        if input_shape != output_shape and whole.inputs[0].shape == whole.outputs[0].shape:
            return name, input_shape, output_shape
    return None


def relative_difference(expected: Tensor, actual: Tensor, whole: Tensor) -> float:
    """The largest difference relative to the largest element of the whole reference; infinite if it is NaN."""
    difference = float((actual.detach().double() - expected.detach().double()).abs().max())
    peak = float(whole.detach().double().abs().max())
    return difference / max(peak, 1e-300) if difference == difference else float("inf")


def tp_shard(whole: Tensor, shape: Sequence[int], place: TPRank) -> Tensor | None:
    """The part of a tensor that a tensor-parallel rank holds, by its local shape: all of it, or a shard of one dim.

    Adjacent ranks hold the same shard if there are fewer shards than ranks. None if the shape is neither.
    """
    if tuple(whole.shape) == tuple(shape):
        return whole
    split = [dim for dim, (a, b) in enumerate(zip(whole.shape, shape, strict=False)) if a != b]
    if whole.dim() != len(shape) or len(split) != 1:
        return None
    dim, size = split[0], shape[split[0]]
    shards = whole.shape[dim] // size if size and whole.shape[dim] % size == 0 else 0
    if not shards or place.size % shards:
        return None
    return whole.narrow(dim, place.rank // (place.size // shards) * size, size)
