"""ZeRO-2 and 3: parameters, gradients and optimizer state sharded over the data group, by torch's FSDP2.

``fully_shard`` replaces each parameter by this rank's shard, gathers the parameters of a unit when it is called and
reduce-scatters its gradients after its backward (Rajbhandari et al. 2020; Zhao et al. 2023). It is applied to the units
of each stage and to the stage, over the data group; it treats a tensor-parallel shard as the whole parameter. This
module adds the reductions that FSDP2 does not know, on shards, after the backward: sums over the replicas of hybrid
sharding, over ``tp`` and over tied stages, and zeros for parameters without a gradient.

The keys ``gather`` and ``reduce`` determine when parameters are gathered and gradients reduced (M microbatches):

==============================  =========================================  =====================================
``gather`` / ``reduce``         gathers of a unit, held …                  reductions of a unit, held meanwhile
==============================  =========================================  =====================================
step                            1, from first forward to last backward     1; whole gradients over the step
microbatch                      2 M, during a forward or a backward        M; a shard of the gradient
==============================  =========================================  =====================================

Under ``gather=microbatch`` the reshard policy of a unit saves gathers: a unit that is kept until its backward, or whose
backward reads no parameter, is gathered once per microbatch. A stage's own parameters, which belong to no unit, are
always kept from a forward to its backward. Level 2 is ``gather=step``.

Gathers and reductions use :mod:`megastack.comm.collectives` through FSDP2's interface for custom communication, so the
communication counters include exactly the bytes that are sent, padding included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megastack.comm.collectives import all_gather, start_all_reduce_
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError
from megastack.gradients.fsdp_units import Compute, UnitSharder, shard_dim
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import Reduction, data_sharding, make_reductions, partial_sums
from megastack.mesh.mesh import Mesh
from megastack.placement.boxes import Box
from megastack.placement.module import BoxView, ReshardPolicy, placements_of


class FullyShardedGradients:
    """The gradients of this rank's stages. The constructor shards their parameters over the data group.

    All ranks of a pipeline must construct this object together. Afterwards a parameter is whole only while its unit
    computes; :meth:`weights` returns the shards.

    Args:
        modules: this rank's stages in order; a ``placements()`` must declare each parameter. Parameters below fp32 are
            sharded as fp32 main parameters, and rounded to their former dtype for gathers and computation.
        mesh: the mesh, with several ranks in a shard group.
        shard_size: the number of adjacent data ranks that share a parameter; ``None`` for all.
        units: the sub-modules whose parameters are used only by calling them, in order of use, each with its reshard
            policy.
        gather: ``step`` or ``microbatch``.
        reduce: ``step`` or ``microbatch``.
        groups: the optimizer group of each global name; ``None`` if only the placement's ``decay`` differs.
        reduce_dtype: the dtype in which gradients are summed over a shard group; ``None`` for the dtype in which they
            accumulate.
        compiled: the units whose ``forward`` runs as compiled code.

    Attributes:
        buckets: the shards of the trained parameters.
        differ_over_data: whether ranks that differ only in dp and cp hold different shards.

    Raises:
        PlacementError: a parameter cannot be sharded: a scalar, a parameter that two stages of this rank share, or a
            parameter whose module has another one in a different dtype.
    """

    _finished: bool

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        *,
        shard_size: int | None = None,
        units: Mapping[nn.Module, ReshardPolicy] | None = None,
        gather: str = "step",
        reduce: str = "step",
        groups: Mapping[str, ParameterGroup] | None = None,
        reduce_dtype: torch.dtype | None = None,
        compiled: Collection[nn.Module] = (),
    ) -> None:
        self.mesh = mesh
        self._gather, self._reduce = gather, reduce
        named = [pair for module in modules for pair in module.named_parameters()]
        _check(named)
        placements = {name: place for module in modules for name, place in placements_of(module).items()}
        reductions = make_reductions(
            [(name, p, placements[name]) for name, p in named], mesh, zero=3, shard_size=shard_size
        )
        self.differ_over_data = reductions.differ_over_data
        of_name = {name: Compute(parameter.dtype, reductions.by_name[name].data.shard) for name, parameter in named}
        assert all(compute.shard.size > 1 for compute in of_name.values()), "a shard group of one rank shards nothing"
        _promote_(named)
        sharder = UnitSharder(
            {parameter: of_name[name] for name, parameter in named if parameter.numel()},
            Compute(torch.float32, data_sharding(mesh, zero=3, shard_size=shard_size).shard),
            mesh.device,
            reduce_dtype,
            compiled,
        )
        for module in modules:
            sharder.shard_stage(module, units or {}, gather=gather)
        self._stages = [cast(FSDPModule, module) for module in modules]
        self._fsdp_modules = [x for module in modules for x in module.modules() if isinstance(x, FSDPModule)]
        self._parameters = {name: p for module in modules for name, p in module.named_parameters()}
        self._shards = {
            name: ParameterShard(
                name,
                parameter.shape,
                _local(parameter),
                reductions.by_name[name],
                compute=of_name[name].dtype,
                group=groups[name] if groups is not None and parameter.requires_grad else None,
                decay=groups is not None or placements[name].decay,
            )
            for name, parameter in self._parameters.items()
        }
        self.buckets = tuple(self._shards[name] for name, p in self._parameters.items() if p.requires_grad)
        self._partial_sums = partial_sums(self.buckets, lambda shard: shard.name)
        self._begin()

    def mark_last_backward(self, stage: int, pending: Collection[Tensor] | None = None) -> None:
        """Mark the next backward of ``modules[stage]`` as its last of this step.

        FSDP2 reduces a unit when its backward is over and would miss a weight gradient that is computed later, so
        schedules that defer weight gradients (``pending``) are rejected before a run.
        """
        assert pending is None, "FSDP2 does not support deferred weight gradients"
        self._set(self._stages[stage], last=True)

    def finish(self) -> None:
        """Complete all reductions of the step; afterwards the shards hold gradients of the global batch."""
        assert not self._finished, "finish() runs once per step; call zero_() before the next one"
        self.wait_parameters()
        for shard in self.buckets:
            gradient = self._parameters[shard.name].grad
            shard.gradient = torch.zeros_like(shard.local) if gradient is None else _local(gradient)
        _sum_shards((shard, shard.reduction.data.replicas) for shard in self.buckets)
        for sums in self._partial_sums:
            _sum_shards(sums)
        self._finished = True

    def zero_(self) -> None:
        """Clear all gradients for the next step."""
        for shard in self.buckets:
            shard.gradient = shard.rounded = self._parameters[shard.name].grad = None
        self._begin()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter's gradient on this rank by global name, after :meth:`finish`.

        Each call gathers them, a collective over the data group. This is meant for inspection.
        """
        return ((shard.name, shard.whole(shard.local_gradients)) for shard in self.buckets)

    def weights(self) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """This rank's shard of each parameter by global name; a rounded copy if modules use a lower precision."""
        self.wait_parameters()
        for shard in self._shards.values():
            shard.rounded = shard.local.to(shard.compute) if shard.is_rounded else None
        return (pair for shard in self._shards.values() for pair in shard.parts(shard.as_used))

    @torch.no_grad()
    def copy_model_to_main(self, names: Collection[str] | None = None) -> None:
        """Copy the last result of :meth:`weights` into the main parameters (only ``names``, if given)."""
        for shard in self._shards.values():
            if shard.rounded is not None and (names is None or shard.name in names):
                shard.local.copy_(shard.rounded)

    def gather_parameters(self) -> None:
        """Does nothing: units gather their parameters when they are called."""

    def wait_parameters(self) -> None:
        """Free gathered parameters that are about to become stale, or were gathered for a validation."""
        for module in self._fsdp_modules:
            module.reshard()

    def _begin(self) -> None:
        self._finished = False
        for stage in self._stages:
            self._set(stage, last=False)

    def _set(self, stage: FSDPModule, *, last: bool) -> None:
        stage.set_is_last_backward(last)
        stage.set_reshard_after_backward(last or self._gather == "microbatch")
        stage.set_requires_gradient_sync(last or self._reduce == "microbatch")


class ParameterShard:
    """This rank's shard of a parameter: equal parts of one dim over the shard group, inside the tensor-parallel shard.

    It is a box of the local parameter, contiguous in memory. :func:`shard_dim` chooses the dim.

    Args:
        name: the global name.
        shape: the shape of the whole local parameter.
        local: the values of the shard, contiguous.
        reduction: how its gradient is reduced.
        compute: the dtype in which modules use it.
        group: the optimizer group; ``None`` if none was given.
        decay: whether weight decay applies.

    Attributes:
        gradient: set when a step is finished.
        rounded: the shard in the dtype ``compute``, from :meth:`FullyShardedGradients.weights` to the end of the step.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        local: Tensor,
        reduction: Reduction,
        *,
        compute: torch.dtype,
        group: ParameterGroup | None = None,
        decay: bool = True,
    ) -> None:
        self.name, self.shape, self.local = name, tuple(shape), local
        self.reduction, self.group, self.decay = reduction, group, decay
        self.compute = compute
        self.dim = shard_dim(self.shape, reduction.data.shard.size)
        self.gradient: Tensor | None = None
        self.rounded: Tensor | None = None

    @property
    def local_parameters(self) -> Tensor:
        """The flat values."""
        return self.local.view(-1)

    @property
    def as_used(self) -> Tensor:
        """The flat values as modules use them: ``rounded``, or the values themselves."""
        return self.local_parameters if self.rounded is None else self.rounded.view(-1)

    @property
    def local_gradients(self) -> Tensor:
        """The flat gradient."""
        assert self.gradient is not None, f"{self.name}: its gradient exists after finish()"
        return self.gradient.view(-1)

    @property
    def is_rounded(self) -> bool:
        """Whether modules use it in a lower precision."""
        return self.local.dtype != self.compute

    @property
    def box(self) -> Box:
        """The box of the shard in the local parameter."""
        if self.is_empty:
            return Box((0,) * len(self.shape), self.shape)
        start = min(self._length * self.reduction.data.shard.rank, self.shape[self.dim])
        offset = tuple(start if dim == self.dim else 0 for dim in range(len(self.shape)))
        return Box(offset, tuple(self.local.shape))

    @property
    def is_empty(self) -> bool:
        """Whether the parameter has no elements; every rank then holds the whole parameter."""
        return not prod(self.shape)

    @property
    def _length(self) -> int:
        """The size of the largest shard in the sharded dim."""
        return -(-self.shape[self.dim] // self.reduction.data.shard.size)

    def parts(self, local: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """The box in a tensor of the shard's layout; none if other ranks hold all elements."""
        box = self.box
        yield self.name, ((box, local.view(box.size)),) if box.numel or self.is_empty else ()

    def whole(self, local: Tensor) -> Tensor:
        """Gather a tensor of the shard's layout from the shard group, in the shape of the local parameter."""
        if self.is_empty:
            return local.view(self.shape)
        padded = local.new_zeros([self._length if dim == self.dim else size for dim, size in enumerate(self.shape)])
        padded.narrow(self.dim, 0, self.local.shape[self.dim]).copy_(local.view(self.local.shape))
        gathered = all_gather(padded, self.reduction.data.shard, self.dim)
        return torch.narrow(gathered, self.dim, 0, self.shape[self.dim])


def _sum_shards(shards: Iterable[tuple[ParameterShard, AxisGroup]]) -> None:
    """Sum each gradient over its group, with one collective per group and dtype."""
    together: dict[tuple[AxisGroup, torch.dtype], list[Tensor]] = {}
    for shard, group in shards:
        if group.size > 1 and shard.local_gradients.numel():
            together.setdefault((group, shard.local_gradients.dtype), []).append(shard.local_gradients)
    sums = [(own, start_all_reduce_(torch.cat(own), group)) for (group, _), own in together.items()]
    for own, pending in sums:
        for gradient, total in zip(own, pending.wait().split([x.numel() for x in own]), strict=True):
            gradient.copy_(total)


def _promote_(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Turn trained parameters with elements into main parameters."""
    for _, parameter in named:
        if parameter.numel() and parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


def _check(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    errors = [
        f"{name}: a scalar cannot be cut over data ranks; declare it with shape (1,)"
        for name, p in named
        if not p.dim()
    ]
    seen: set[nn.Parameter] = set()
    for name, parameter in named:
        if parameter in seen:
            errors.append(f"{name}: two stages of one rank share it, which parallel.zero.stage 2 and 3 cannot cut")
        seen.add(parameter)
    if errors:
        raise PlacementError("\n".join(errors))


def _local(x: Tensor) -> Tensor:
    """This rank's shard of a tensor, as a view; the whole tensor if it has no elements."""
    if not x.numel():
        return x.detach()
    assert isinstance(x, DTensor)
    with torch.no_grad():
        return x.to_local()
