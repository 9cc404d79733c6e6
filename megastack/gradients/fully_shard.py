"""ZeRO-2 and 3: parameters, gradients and optimizer state cut over data ranks, by torch's FSDP2.

``fully_shard`` swaps each parameter for this rank's shard of it, gathers the parameters of a unit when it is called and
reduce-scatters its gradients behind its backward (Rajbhandari et al. 2020; Zhao et al. 2023). It is applied to the
units of each stage and to the stage, on the data ranks; to it a tensor-parallel shard is the whole parameter. What
FSDP2 does not know is done here, on shards, after the backward: sums over the replicas of hybrid sharding, over ``tp``
and over tied stages, and zeros for what had no gradient.

When parameters are gathered and gradients reduced is a choice (M microbatches):

==============================  =========================================  =====================================
``gather`` / ``reduce``         gathers of a unit, held …                  reductions of a unit, held meanwhile
==============================  =========================================  =====================================
step                            1, from first forward to last backward     1; whole gradients over the step
microbatch                      2 M, during a forward or a backward        M; a shard of the gradient
==============================  =========================================  =====================================

A stage's own parameters, those of no unit, stay gathered from a forward to its backward. Stage 2 is ``gather=step``.

Gathers and reductions go through :mod:`megastack.comm.collectives` by FSDP2's own interface for custom communication,
so the ledger counts each with the bytes that really travel, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megastack.comm.collectives import Pending, start_all_gather_, start_all_reduce_, start_reduce_scatter_
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError
from megastack.gradients.interface import Part
from megastack.gradients.reduction import reduction_of, tied_groups
from megastack.gradients.shard import ParameterShard, shard_dim
from megastack.gradients.sharding import sharding_of
from megastack.mesh.mesh import Mesh
from megastack.optim.groups import OptimGroup
from megastack.placement.module import placements_of


class FullyShardedGradients:
    """The gradients of this rank's stages, whose parameters it cuts over data ranks when it is made.

    All ranks of a pipeline must make theirs at the same time. Afterwards a parameter is whole only while its unit is at
    work; :meth:`weights` gives the shards.

    Args:
        modules: this rank's stages in order; each parameter is declared by a ``placements()``, at the precision of its
            master: shards are what is updated.
        mesh: the mesh, with several ranks in a shard group.
        shard_size: the adjacent ``dp·cp`` ranks that share a parameter; ``None`` for all.
        units: sub-modules whose parameters are used by calling them and in no other way; each is gathered by itself.
        gather: ``step`` or ``microbatch``.
        reduce: ``step`` or ``microbatch``.
        groups: the optimizer group of each global name; ``None`` where nothing but the placement's ``decay`` differs.
        tied: the groups that hold a parameter of the same name on other stages; ``None`` finds them.
        reduce_dtype: the dtype in which gradients are summed over a shard group; ``None`` for the parameters'.

    Attributes:
        buckets: the shards of the trained parameters.

    Raises:
        PlacementError: a parameter that cannot be cut: a scalar, or one that two stages of this rank share.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        *,
        shard_size: int | None = None,
        units: Sequence[nn.Module] = (),
        gather: str = "step",
        reduce: str = "step",
        groups: Mapping[str, OptimGroup] | None = None,
        tied: Mapping[str, AxisGroup] | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.mesh = mesh
        self.sharding = sharding_of(mesh, 3, shard_size)
        assert self.sharding.shard.size > 1, "one rank has nobody to share parameters with"
        self._gather, self._reduce = gather, reduce
        named = [pair for module in modules for pair in module.named_parameters()]
        _check(named)
        placements = {name: place for module in modules for name, place in placements_of(module).items()}
        if tied is None:
            tied = tied_groups([(name, parameter) for name, parameter in named if parameter.requires_grad], mesh)
        self._stages = [self._cut(module, units, reduce_dtype) for module in modules]
        self._parts = [part for stage in self._stages for part in stage.modules() if isinstance(part, FSDPModule)]
        self._shards: dict[str, ParameterShard] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in (pair for module in modules for pair in module.named_parameters()):
            reduction = reduction_of(name, placements[name], mesh, tied, self.sharding)
            group, decay = (groups[name], True) if groups is not None else (None, placements[name].decay)
            dim, local = shard_dim(parameter.shape, self.sharding.shard.size), _local(parameter)
            self._parameters[name] = parameter
            self._shards[name] = ParameterShard(
                name, parameter.shape, dim, local, reduction, group=group, decay=decay
            )
        self.buckets = tuple(self._shards[name] for name, p in self._parameters.items() if p.requires_grad)
        self._begin()

    def arm(self, stage: int) -> None:
        """Say that the next backward of ``modules[stage]`` is its last of this step."""
        self._set(self._stages[stage], last=True)

    def finish(self) -> None:
        """Complete every sum of the step: afterwards the shards hold gradients of the global batch."""
        assert not self._finished, "finish() comes once a step; call zero_() before the next one"
        self.wait_parameters()
        for shard in self.buckets:
            gradient = self._parameters[shard.name].grad
            shard.gradient = torch.zeros_like(shard.local) if gradient is None else _local(gradient)
        _sum_over(lambda shard: shard.reduction.data.replicas, self.buckets)
        _sum_over(lambda shard: shard.reduction.tensor, self.buckets)
        _sum_over(lambda shard: shard.reduction.tied, sorted(self.buckets, key=lambda shard: shard.name))
        self._finished = True

    def zero_(self) -> None:
        """Clear all gradients for the next step."""
        for shard in self.buckets:
            shard.gradient = self._parameters[shard.name].grad = None
        self._begin()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter's gradient on this rank by global name, after :meth:`finish`.

        They are put together at each call, a collective of all data ranks: for looking at gradients.
        """
        return ((shard.name, shard.whole(shard.own_gradients)) for shard in self.buckets)

    def weights(self) -> Iterator[tuple[str, tuple[Part, ...]]]:
        """This rank's shard of each parameter by global name, views."""
        return (pair for shard in self._shards.values() for pair in shard.parts(shard.own_parameters))

    def gather_parameters(self) -> None:
        """Nothing: units gather their parameters when they are called."""

    def wait_parameters(self) -> None:
        """Let go of whole parameters, which are about to be out of date, or were read for a validation."""
        for part in self._parts:
            part.reshard()

    def _begin(self) -> None:
        self._finished = False
        for stage in self._stages:
            self._set(stage, last=False)

    def _set(self, stage: FSDPModule, *, last: bool) -> None:
        stage.set_is_last_backward(last)
        stage.set_reshard_after_backward(last or self._gather == "microbatch")
        stage.set_requires_gradient_sync(last or self._reduce == "microbatch")

    def _cut(self, stage: nn.Module, units: Sequence[nn.Module], reduce_dtype: torch.dtype | None) -> FSDPModule:
        """Cut the parameters of a stage; its units are those of ``units`` that it has."""
        shard = self.sharding.shard
        here = set(stage.modules())
        mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, shard.group), self.mesh.device.type)
        options: dict[str, Any] = {
            "mesh": mesh,
            "shard_placement_fn": partial(_placement, ranks=shard.size),
            "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        }
        for part in (unit for unit in units if unit in here):
            fully_shard(part, reshard_after_forward=self._gather == "microbatch", **options)
        fully_shard(stage, reshard_after_forward=False, **options)
        for part in stage.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
                part.set_custom_all_gather(_Gather(shard))
                part.set_custom_reduce_scatter(_Reduce(shard, reduce_dtype))
        return cast(FSDPModule, stage)


def _check(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    faults = [f"{name}: a scalar cannot be cut over data ranks; declare it with shape (1,)" for name, p in named if not p.dim()]
    seen: set[nn.Parameter] = set()
    for name, parameter in named:
        if parameter in seen:
            faults.append(f"{name}: two stages of one rank share it, which parallel.zero.stage 2 and 3 cannot cut")
        seen.add(parameter)
    if faults:
        raise PlacementError("\n".join(faults))


def _placement(parameter: nn.Parameter, *, ranks: int) -> Shard:
    return Shard(shard_dim(parameter.shape, ranks))


def _local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory."""
    assert isinstance(x, DTensor)
    with torch.no_grad():
        return x.to_local()


def _sum_over(
    group_of: Callable[[ParameterShard], AxisGroup | None], shards: Sequence[ParameterShard]
) -> None:
    """Sum gradients over the group of each, those of one group and dtype in one operation."""
    together: dict[tuple[AxisGroup, torch.dtype], list[Tensor]] = {}
    for shard in shards:
        group = group_of(shard)
        if group is not None and group.size > 1:
            together.setdefault((group, shard.own_gradients.dtype), []).append(shard.own_gradients)
    sums = [(own, start_all_reduce_(torch.cat(own), group)) for (group, _), own in together.items()]
    for own, pending in sums:
        for gradient, total in zip(own, pending.wait().split([x.numel() for x in own]), strict=True):
            gradient.copy_(total)


class _Gather:
    """FSDP2's all-gather, counted; its input lies in its output already."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        start_all_gather_(output_tensor, self._group).wait()


class _Reduce:
    """FSDP2's reduce-scatter, counted, in the dtype that is wanted on the wire."""

    def __init__(self, group: AxisGroup, dtype: torch.dtype | None) -> None:
        self._group, self._dtype = group, dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        summing: Pending = start_reduce_scatter_(input_tensor.to(self._dtype or input_tensor.dtype), self._group)
        output_tensor.copy_(summing.wait())
