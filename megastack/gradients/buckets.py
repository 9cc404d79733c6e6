"""Flat gradient buckets: gradients gather in few buffers, whose sums over the mesh overlap with the last backward.

A bucket is two flat buffers: each of its parameters becomes a view of the one, its ``.grad`` a view of the other, so
autograd accumulates microbatches in place and the optimizer updates whole buckets. Gradients are held in
``promote_types(dtype, fp32)``; where that is not the parameter's dtype a hook adds each new gradient to the buffer.
Under ZeRO-1 the sum over data ranks is a reduce-scatter, and each rank updates a slice of every bucket; after that
:meth:`~GradientBuckets.gather_parameters` puts the parameters together again (:mod:`megastack.gradients.zero1`).

A step goes ``backward…``, :meth:`~GradientBuckets.mark_last_backward` right before the last backward of a stage, that
backward, :meth:`~GradientBuckets.finish`, clip, update, :meth:`~GradientBuckets.zero_`. Where backwards are split, the
one that counts is the last that computes weight gradients. A bucket is ready when every gradient in
it was stored after its stage was marked; it starts when it *and all before it* are ready. So all ranks start the same
collectives in the same order, whatever the order of their backwards, and a parameter that was not used only costs
overlap: :meth:`~GradientBuckets.finish` starts what is left.

Only the sum over ``dp·cp`` runs under the backward. The small sums over ``tp`` and over tied stages (and those over the
replicas of slices) follow in
:meth:`~GradientBuckets.finish`: started from a hook they could slip between the backward's own collectives on ``tp``
in another order on each rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megastack.comm.collectives import Pending, start_all_gather_, start_all_reduce_
from megastack.comm.group import AxisGroup
from megastack.errors import ConfigError
from megastack.gradients.bucket import Bucket
from megastack.gradients.bucket_spec import BucketKey, NamedParameter, make_bucket_specs
from megastack.gradients.interface import BoxView
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import Reduction, reduction_of, tied_groups
from megastack.gradients.sharding import Sharding, sharding_of
from megastack.gradients.zero1 import ParameterGathers
from megastack.mesh.mesh import Mesh
from megastack.placement.boxes import Box
from megastack.placement.module import placements_of
from megastack.placement.placement import Placement
from megastack.weight_gradients import AccumulationHook

BUCKET_BYTES = 25 * 2**20
"""The size of gradients at which a bucket is closed, by default."""


@dataclass(frozen=True, eq=False)
class _Watched:
    """A parameter whose gradients are watched: the number of its bucket, its part of it, the stages that use it."""

    bucket: int
    parameter: nn.Parameter
    view: Tensor
    stages: frozenset[int]

    def attach(self) -> None:
        """Let autograd accumulate in the buffer, where the dtypes are one."""
        self.parameter.grad = self.view if self.view.dtype == self.parameter.dtype else None

    def collect(self) -> None:
        """Add a gradient that autograd put elsewhere (other dtype, or ``.grad`` was cleared) to the buffer."""
        if self.parameter.grad is not None:
            self.view.add_(self.parameter.grad)
            self.attach()


class GradientBuckets:
    """The gradients of this rank's stages.

    All ranks of a pipeline must make theirs at the same time (tied parameters are found by their common name).

    Args:
        modules: this rank's stages in order; each parameter is declared by a ``placements()``.
        mesh: the mesh; gradients are summed over ``dp·cp``, and over ``tp`` and ``pp`` where the placement says so.
        zero: the ZeRO stage, 0 or 1; 2 and 3 are :class:`megastack.gradients.fully_shard.FullyShardedGradients`.
        shard_size: the adjacent ``dp·cp`` ranks that share a bucket under ZeRO-1; ``None`` for all.
        units: sub-modules that are used only by calling them, in order of use; under ZeRO-1 each waits for its own
            parameters alone.
        groups: the optimizer group of each global name; ``None`` where nothing but the placement's ``decay`` differs.
        bucket_bytes: the size of gradients at which a bucket is closed.
        tied: the groups that hold a parameter of the same name on other stages; ``None`` finds them.
        reduce_dtype: the dtype in which gradients are summed over data ranks; ``None`` is
            ``promote_types(dtype, fp32)``, in which they accumulate unless this one is wider.

    Attributes:
        buckets: in the order in which they are reduced.

    Raises:
        ConfigError: another ZeRO stage, or a shard size that does not divide dp·cp.
        PlacementError: a parameter has no placement, or one that does not fit.
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
        bucket_bytes: int = BUCKET_BYTES,
        tied: Mapping[str, AxisGroup] | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.mesh = mesh
        if zero not in (0, 1):
            raise ConfigError(f"parallel.zero.stage={zero}: buckets share the optimizer's state alone; use 0 or 1")
        self.sharding = sharding_of(mesh, zero, shard_size)
        named = _trained(modules)
        if tied is None:
            tied = tied_groups([(name, parameter) for name, parameter, _ in named], mesh)
        kind_of = partial(_kind_of, mesh=mesh, tied=tied, groups=groups, data=self.sharding)
        dtype_of = _gradient_dtypes(reduce_dtype)
        plans = make_bucket_specs(named, kind_of, gradient_dtype=dtype_of, bucket_bytes=bucket_bytes)
        self.buckets = tuple(Bucket(plan, dtype_of(plan.kind.dtype), reduce_dtype) for plan in plans)
        self._gathers = ParameterGathers(self.buckets, modules, units)
        self._modules = tuple(modules)
        stages = _stages_of(modules)
        self._watched = [
            _Watched(number, parameter, entry.view(bucket.gradients), stages[parameter])
            for number, bucket in enumerate(self.buckets)
            for entry in bucket.entries
            for parameter in entry.parameters
        ]
        self._hook_all()
        self._begin()

    def mark_last_backward(self, stage: int, awaited: Collection[Tensor] | None = None) -> None:
        """Say that the next backward of ``modules[stage]`` is its last of this step.

        Args:
            stage: the place of the module.
            awaited: the parameters whose gradients are still to come, where the others have theirs; ``None`` where
                that is not known.
        """
        self._armed.add(stage)
        if awaited is None:
            return
        for index, watched in enumerate(self._watched):
            if stage in watched.stages <= self._armed and watched.parameter not in awaited:
                self._waiting[watched.bucket].discard(index)
        self._start_ready()

    def finish(self) -> None:
        """Complete every sum of the step: afterwards the own slices hold gradients of the global batch."""
        assert not self._finished, "finish() comes once a step; call zero_() before the next one"
        while len(self._pending) < len(self.buckets):
            self._start_next()
        for pending in self._pending:
            pending.wait()
        if self.sharding.shard.size > 1:
            _wait(bucket.start_replica_sum() for bucket in self.buckets)
        self._sum_over(lambda reduction: reduction.tensor, self.buckets)
        by_name = sorted(self.buckets, key=lambda bucket: bucket.entries[0].name)
        self._sum_over(lambda reduction: reduction.tied, by_name)
        self._finished = True

    def zero_(self) -> None:
        """Clear all gradients for the next step."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
        for watched in self._watched:
            watched.attach()
        self._begin()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter's gradient on this rank by global name, as views; the step's after :meth:`finish`.

        Under ZeRO-1 the slices are gathered then, at each call: a collective of all data ranks, for looking at
        gradients; a step does not need it.
        """
        if self._finished:
            _wait(start_all_gather_(bucket.gradients, bucket.reduction.data.shard) for bucket in self.buckets)
        return (pair for bucket in self.buckets for pair in bucket.views(bucket.gradients))

    def weights(self) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """Each parameter, frozen ones included, whole as this rank holds it, by global name."""
        named = (pair for module in self._modules for pair in module.named_parameters())
        return ((name, ((Box((0,) * x.dim(), tuple(x.shape)), x.detach()),)) for name, x in named)

    def copy_model_to_main(self, names: Collection[str] | None = None) -> None:
        """Nothing: :meth:`weights` are the parameters themselves."""

    def gather_parameters(self) -> None:
        """Begin to put the parameters together after an update of the own slices; modules wait for them when called."""
        self._gathers.start()

    def wait_parameters(self) -> None:
        """Wait until all parameters are whole: before anything but a module's forward reads or changes them."""
        self._gathers.wait()

    # Readiness: hooks run where autograd stores a gradient.

    def _begin(self) -> None:
        self._armed: set[int] = set()
        self._waiting: list[set[int]] = [set() for _ in self.buckets]
        for index, watched in enumerate(self._watched):
            self._waiting[watched.bucket].add(index)
        self._pending: list[Pending] = []
        self._finished = False

    def _hook_all(self) -> None:
        for index, watched in enumerate(self._watched):
            watched.attach()
            watched.parameter.register_post_accumulate_grad_hook(_Tell(self, index))

    def _stored(self, index: int) -> None:
        """The gradient of a parameter was stored; called for each of them in each microbatch, so it does little."""
        watched = self._watched[index]
        assert not self._finished, "a gradient came after finish(); call zero_() before the next step"
        assert watched.bucket >= len(self._pending), (
            "a gradient came after its bucket was started; arm() the last backward only"
        )
        if watched.parameter.grad is not watched.view:
            watched.collect()
        if self._armed and watched.stages <= self._armed:
            self._waiting[watched.bucket].discard(index)
            self._start_ready()

    def _start_ready(self) -> None:
        """Start the buckets that are ready, as far as all before them are."""
        while len(self._pending) < len(self.buckets) and not self._waiting[len(self._pending)]:
            self._start_next()

    def _start_next(self) -> None:
        self._pending.append(self.buckets[len(self._pending)].start_reduction())

    def _sum_over(self, group_of: Callable[[Reduction], AxisGroup | None], buckets: Sequence[Bucket]) -> None:
        grouped = ((bucket, group_of(bucket.reduction)) for bucket in buckets)
        _wait(start_all_reduce_(bucket.local_gradients, group) for bucket, group in grouped if group is not None)


class _Tell(AccumulationHook):
    """The hook of a parameter; it must not keep the buckets alive, for Python cannot see a cycle through autograd."""

    def __init__(self, buckets: GradientBuckets, index: int) -> None:
        self._buckets, self._index = weakref.ref(buckets), index

    def __call__(self, parameter: Tensor) -> None:
        alive = self._buckets()
        if alive is not None:
            alive._stored(self._index)


def _wait(operations: Iterable[Pending]) -> None:
    """Start all, then wait for all."""
    for pending in list(operations):
        pending.wait()


def _trained(modules: Sequence[nn.Module]) -> list[NamedParameter]:
    """The trained parameters of all modules in reverse order of use; one that modules share under its first name."""
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


def _kind_of(
    name: str,
    parameter: nn.Parameter,
    placement: Placement,
    *,
    mesh: Mesh,
    tied: Mapping[str, AxisGroup],
    groups: Mapping[str, ParameterGroup] | None,
    data: Sharding,
) -> BucketKey:
    reduction = reduction_of(name, placement, mesh, tied, data)
    if groups is None:
        return BucketKey(parameter.dtype, reduction, None, placement.decay)
    return BucketKey(parameter.dtype, reduction, groups[name], True)


def _gradient_dtypes(wanted: torch.dtype | None) -> Callable[[torch.dtype], torch.dtype]:
    return lambda dtype: torch.promote_types(torch.promote_types(dtype, torch.float32), wanted or dtype)
