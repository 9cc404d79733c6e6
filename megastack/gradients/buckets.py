"""Flat gradient buckets, whose reductions overlap with the last backward of a step.

A bucket is two flat buffers. Each of its parameters becomes a view of one, and its ``.grad`` a view of the other, so
autograd accumulates microbatches in place and the optimizer updates whole buckets. Gradients accumulate in
``promote_types(dtype, fp32)``, which is the parameter's ``grad_dtype``. Before torch 2.10 a parameter has none; if the
dtypes differ, a hook then adds each new gradient to the buffer. Under ZeRO-1 the sum over the data group is a
reduce-scatter, each rank updates its local shard of every bucket, and :meth:`~GradientBuckets.gather_parameters`
restores the parameters.

A step runs ``backward…``, :meth:`~GradientBuckets.mark_last_backward` right before the last backward of a stage, that
backward, :meth:`~GradientBuckets.finish`, clip, update, :meth:`~GradientBuckets.zero_`. Where backwards are split, the
last backward is the last one that computes weight gradients. A bucket is ready when all its gradients were accumulated
after their stage was marked; its reduction starts when it *and all buckets before it* are ready. All ranks therefore
start the same collectives in the same order, whatever the order of their backwards. An unused parameter only reduces
the overlap: :meth:`~GradientBuckets.finish` starts the remaining buckets.

Only the sum over the data group overlaps with the backward. The small sums over model axes, over tied stages and over
the replicas of shards run in :meth:`~GradientBuckets.finish`. If a hook started them, they could run between the
backward's own collectives on ``tp`` in a different order on each rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megastack.comm.collectives import Pending, start_all_gather_, start_all_reduce_
from megastack.errors import ConfigError
from megastack.gradients.bucket import Bucket, ParameterGathers
from megastack.gradients.bucket_spec import BucketKey, make_bucket_specs
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import NamedParameter, make_reductions, partial_sums
from megastack.mesh.mesh import Mesh
from megastack.placement.boxes import Box
from megastack.placement.module import BoxView, placements_of
from megastack.placement.placement import DATA_AXES, Placement
from megastack.torch_private import foreach_zero_
from megastack.weight_gradients import HAS_GRAD_DTYPE, AccumulationHook


def default_bucket_size(device: torch.device, data_ranks: int) -> int:
    """The gradient elements at which a bucket is closed by default.

    On a GPU this is Megatron's rule: buckets grow with the data group, so that each rank's part of a reduction stays
    large. On a CPU it is 25 MiB in fp32. Models there are small, and in a bucket or two they would not overlap at all.
    """
    return 25 * 2**18 if device.type == "cpu" else max(40_000_000, 1_000_000 * data_ranks)


@dataclass(frozen=True, eq=False)
class _Accumulator:
    """Accumulates the gradients of a parameter: the index of its bucket, its view, the stages that use it."""

    bucket: int
    parameter: nn.Parameter
    view: Tensor
    stages: frozenset[int]

    def prepare(self) -> None:
        """Set the dtype in which autograd accumulates."""
        self.parameter.grad = None
        if HAS_GRAD_DTYPE:
            self.parameter.grad_dtype = self.view.dtype
        self.attach()

    def attach(self) -> None:
        """Let autograd accumulate in the buffer if the dtypes allow it."""
        same = HAS_GRAD_DTYPE or self.view.dtype == self.parameter.dtype
        self.parameter.grad = self.view if same else None

    def collect(self) -> None:
        """Add a gradient that autograd stored elsewhere (other dtype, or ``.grad`` was cleared) to the buffer."""
        if self.parameter.grad is not None:
            self.view.add_(self.parameter.grad)
            self.attach()


class GradientBuckets:
    """The gradients of this rank's stages.

    All ranks of a pipeline must construct this object together, since tied parameters are found by their common name.

    Args:
        modules: this rank's stages in order; a ``placements()`` must declare each parameter.
        mesh: the mesh; gradients are summed over the data group, and over other axes as the placement declares.
        zero: the ZeRO level, 0 or 1; levels 2 and 3 are :class:`megastack.gradients.fully_shard.FullyShardedGradients`.
        shard_size: the number of adjacent data ranks that share a bucket under ZeRO-1; ``None`` for all.
        units: sub-modules that are used only by calling them, in order of use; under ZeRO-1 each waits only for its own
            parameters.
        groups: the optimizer group of each global name; ``None`` if only the placement's ``decay`` differs.
        bucket_size: the gradient elements at which a bucket is closed; ``None`` for :func:`default_bucket_size`.
        reduce_dtype: the dtype in which gradients are summed over the data group; by default
            ``promote_types(dtype, fp32)``. Gradients accumulate in the wider of the two.

    Attributes:
        buckets: the buckets, in the order in which they are reduced.
        differ_over_data: whether ranks that differ only in dp and cp hold different shards.

    Raises:
        ConfigError: the ZeRO level is not 0 or 1, or the shard size does not divide dp·cp.
        PlacementError: a parameter has no placement, or one that does not match it.
    """

    _finished: bool

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        *,
        zero: int = 0,
        shard_size: int | None = None,
        units: Sequence[nn.Module] = (),
        groups: Mapping[str, ParameterGroup] | None = None,
        bucket_size: int | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.mesh = mesh
        if zero not in (0, 1):
            raise ConfigError(f"parallel.zero.stage={zero}: buckets shard the optimizer state only; use 0 or 1")
        named = _trained(modules)
        reductions = make_reductions(named, mesh, zero=zero, shard_size=shard_size)
        self.differ_over_data = reductions.differ_over_data

        def key_of(name: str, parameter: nn.Parameter, placement: Placement) -> BucketKey:
            group, decay = (None, placement.decay) if groups is None else (groups[name], True)
            return BucketKey(parameter.dtype, reductions.by_name[name], group, decay)

        dtype_of = _gradient_dtypes(reduce_dtype)
        size = bucket_size or default_bucket_size(mesh.device, mesh[DATA_AXES].size)
        specs = make_bucket_specs(named, key_of, gradient_dtype=dtype_of, bucket_size=size)
        self.buckets = tuple(Bucket(spec, dtype_of(spec.key.dtype), reduce_dtype) for spec in specs)
        self._partial_sums = partial_sums(self.buckets, lambda bucket: bucket.slots[0].name)
        self._gathers = ParameterGathers(self.buckets, modules, units)
        self._modules = tuple(modules)
        stages = _stages_of(modules)
        self._accumulators = [
            _Accumulator(number, parameter, slot.view(bucket.gradients), stages[parameter])
            for number, bucket in enumerate(self.buckets)
            for slot in bucket.slots
            for parameter in slot.parameters
        ]
        self._register_hooks()
        self._begin()

    def mark_last_backward(self, stage: int, pending: Collection[Tensor] | None = None) -> None:
        """Mark the next backward of ``modules[stage]`` as its last of this step.

        Args:
            stage: the index of the module.
            pending: the parameters whose gradients are not complete yet; all other gradients are. ``None`` if this is
                unknown.
        """
        self._marked.add(stage)
        if pending is None:
            return
        for index, accumulator in enumerate(self._accumulators):
            if stage in accumulator.stages <= self._marked and accumulator.parameter not in pending:
                self._incomplete[accumulator.bucket].discard(index)
        self._start_ready()

    def finish(self) -> None:
        """Complete all reductions of the step; afterwards the local shards hold gradients of the global batch."""
        assert not self._finished, "finish() runs once per step; call zero_() before the next one"
        while len(self._reductions) < len(self.buckets):
            self._start_next()
        for pending in self._reductions:
            pending.wait()
        _wait(bucket.start_replica_sum() for bucket in self.buckets if bucket.is_sharded)
        for sums in self._partial_sums:
            _wait(start_all_reduce_(bucket.local_gradients, group) for bucket, group in sums)
        self._finished = True

    def zero_(self) -> None:
        """Clear all gradients for the next step."""
        foreach_zero_([bucket.gradients for bucket in self.buckets])
        for accumulator in self._accumulators:
            accumulator.attach()
        self._begin()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter's gradient on this rank by global name, as views; reduced after :meth:`finish`.

        Under ZeRO-1 each call after :meth:`finish` gathers the shards, a collective over the data group. This is meant
        for inspection; a step does not need it.
        """
        if self._finished:
            _wait(start_all_gather_(bucket.gradients, bucket.reduction.data.shard) for bucket in self.buckets)
        return (pair for bucket in self.buckets for pair in bucket.views(bucket.gradients))

    def weights(self) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """Each local parameter, frozen ones included, as one box, by global name."""
        named = (pair for module in self._modules for pair in module.named_parameters())
        return ((name, ((Box((0,) * x.dim(), tuple(x.shape)), x.detach()),)) for name, x in named)

    def copy_model_to_main(self, names: Collection[str] | None = None) -> None:
        """Does nothing: :meth:`weights` are the parameters themselves."""

    def gather_parameters(self) -> None:
        """Start to gather the parameters after an update of the local shards; modules wait for them when called."""
        self._gathers.start()

    def wait_parameters(self) -> None:
        """Wait until all parameters are gathered, before they are read or written outside of a module's forward."""
        self._gathers.wait()

    def _begin(self) -> None:
        self._marked: set[int] = set()
        self._incomplete: list[set[int]] = [set() for _ in self.buckets]
        for index, accumulator in enumerate(self._accumulators):
            self._incomplete[accumulator.bucket].add(index)
        self._reductions: list[Pending] = []
        self._finished = False

    def _register_hooks(self) -> None:
        for index, accumulator in enumerate(self._accumulators):
            accumulator.prepare()
            accumulator.parameter.register_post_accumulate_grad_hook(_BucketHook(self, index))

    def _accumulated(self, index: int) -> None:
        """The hook of each parameter. It is called in each microbatch, so it must be cheap."""
        accumulator = self._accumulators[index]
        assert not self._finished, "a gradient was accumulated after finish(); call zero_() before the next step"
        assert accumulator.bucket >= len(self._reductions), (
            "a gradient was accumulated after the reduction of its bucket started; "
            "call mark_last_backward() right before the last backward"
        )
        if accumulator.parameter.grad is not accumulator.view:
            accumulator.collect()
        if self._marked and accumulator.stages <= self._marked:
            self._incomplete[accumulator.bucket].discard(index)
            self._start_ready()

    def _start_ready(self) -> None:
        """Start the reduction of each bucket that is ready, up to the first that is not."""
        while len(self._reductions) < len(self.buckets) and not self._incomplete[len(self._reductions)]:
            self._start_next()

    def _start_next(self) -> None:
        self._reductions.append(self.buckets[len(self._reductions)].start_reduction())


class _BucketHook(AccumulationHook):
    """The hook of one parameter. Holds the buckets weakly, since gc cannot see a cycle through autograd."""

    def __init__(self, buckets: GradientBuckets, index: int) -> None:
        self._buckets, self._index = weakref.ref(buckets), index

    def __call__(self, parameter: Tensor) -> None:
        buckets = self._buckets()
        if buckets is not None:
            buckets._accumulated(self._index)


def _wait(operations: Iterable[Pending]) -> None:
    """Start all, then wait for all."""
    for pending in list(operations):
        pending.wait()


def _trained(modules: Sequence[nn.Module]) -> list[NamedParameter]:
    """The trained parameters of all modules in reverse order of use; a shared one under its first name."""
    found: dict[nn.Parameter, tuple[str, Placement]] = {}
    for module in modules:
        placements = placements_of(module)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found.setdefault(parameter, (name, placements[name]))
    return [(name, parameter, placement) for parameter, (name, placement) in reversed(found.items())]


def _stages_of(modules: Sequence[nn.Module]) -> dict[nn.Parameter, frozenset[int]]:
    """The modules that hold each parameter."""
    stages: dict[nn.Parameter, frozenset[int]] = {}
    for index, module in enumerate(modules):
        for parameter in module.parameters():
            stages[parameter] = stages.get(parameter, frozenset()) | {index}
    return stages


def _gradient_dtypes(reduce_dtype: torch.dtype | None) -> Callable[[torch.dtype], torch.dtype]:
    return lambda dtype: torch.promote_types(torch.promote_types(dtype, torch.float32), reduce_dtype or dtype)
