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

A unit whose backward follows its forward at once, or reads no parameter, is gathered for a microbatch once. So are a
stage's own parameters, those of no unit; they and the former stay from a forward to its backward. Stage 2 is
``gather=step``.

Gathers and reductions go through :mod:`megastack.comm.collectives` by FSDP2's own interface for custom communication,
so the ledger counts each with the bytes that really travel, padding included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megastack.comm.collectives import CountedGather, CountedReduce
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError
from megastack.gradients.interface import BoxView
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import reduction_of, tied_groups
from megastack.gradients.shard import ParameterShard, shard_dim, sum_over
from megastack.gradients.sharding import sharding_of
from megastack.gradients.unit_calls import UnitCalls, require_calls
from megastack.mesh.mesh import Mesh
from megastack.placement.module import placements_of


class FullyShardedGradients:
    """The gradients of this rank's stages, whose parameters it cuts over data ranks when it is made.

    All ranks of a pipeline must make theirs at the same time. Afterwards a parameter is whole only while its unit is at
    work; :meth:`weights` gives the shards.

    Args:
        modules: this rank's stages in order; each parameter is declared by a ``placements()``. Those below fp32 are
            cut as fp32 masters, and rounded to what they were for gathers and computation.
        mesh: the mesh, with several ranks in a shard group.
        shard_size: the adjacent ``dp·cp`` ranks that share a parameter; ``None`` for all.
        units: sub-modules whose parameters are used by calling them and in no other way; each is gathered by itself.
        turning: those of them whose backward follows their forward at once.
        unread: those whose backward reads no parameter.
        gather: ``step`` or ``microbatch``.
        reduce: ``step`` or ``microbatch``.
        groups: the optimizer group of each global name; ``None`` where nothing but the placement's ``decay`` differs.
        tied: the groups that hold a parameter of the same name on other stages; ``None`` finds them.
        reduce_dtype: the dtype in which gradients are summed over a shard group; ``None`` for the parameters'.

    Attributes:
        buckets: the shards of the trained parameters.

    Raises:
        PlacementError: a parameter that cannot be cut: a scalar, one that two stages of this rank share, or one beside
            another of its module in another dtype.
    """

    _finished: bool

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        *,
        shard_size: int | None = None,
        units: Sequence[nn.Module] = (),
        turning: Sequence[nn.Module] = (),
        unread: Sequence[nn.Module] = (),
        gather: str = "step",
        reduce: str = "step",
        groups: Mapping[str, ParameterGroup] | None = None,
        tied: Mapping[str, AxisGroup] | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.mesh = mesh
        self.sharding = sharding_of(mesh, 3, shard_size)
        assert self.sharding.shard.size > 1, "one rank has nobody to share parameters with"
        self._gather, self._reduce = gather, reduce
        named = [pair for module in modules for pair in module.named_parameters()]
        _check(named)
        compute = {name: parameter.dtype for name, parameter in named}
        placements = {name: place for module in modules for name, place in placements_of(module).items()}
        if tied is None:
            tied = tied_groups([(name, parameter) for name, parameter in named if parameter.requires_grad], mesh)
        cutter = _Cutter(self.sharding.shard, mesh.device, _promote_(named), reduce_dtype)
        for module in modules:
            here = set(module.modules())
            inner = [unit for unit in units if unit in here]
            inside = {
                unit: cutter.cut(unit, reshard_after_forward=gather == "microbatch" and unit not in turning)
                for unit in inner
            }
            inside[module] = cutter.cut(module, reshard_after_forward=False)
            for unit in unread:
                if unit in here:
                    cast(FSDPModule, unit).set_unshard_in_backward(False)
            _gather_ahead(inner, module, inside)
            UnitCalls(module, inner)
            paths = {part: path for path, part in module.named_modules()}
            for part, kept in inside.items():
                require_calls(part, kept, paths)
        self._stages = [cast(FSDPModule, module) for module in modules]
        self._parts = [part for module in modules for part in module.modules() if isinstance(part, FSDPModule)]
        self._shards: dict[str, ParameterShard] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in (pair for module in modules for pair in module.named_parameters()):
            self._parameters[name] = parameter
            self._shards[name] = ParameterShard(
                name,
                parameter.shape,
                shard_dim(parameter.shape, self.sharding.shard.size),
                _local(parameter),
                reduction_of(name, placements[name], mesh, tied, self.sharding),
                compute=compute[name],
                group=groups[name] if groups is not None and parameter.requires_grad else None,
                decay=groups is not None or placements[name].decay,
            )
        self.buckets = tuple(self._shards[name] for name, p in self._parameters.items() if p.requires_grad)
        self._begin()

    def mark_last_backward(self, stage: int, awaited: Collection[Tensor] | None = None) -> None:
        """Say that the next backward of ``modules[stage]`` is its last of this step.

        FSDP2 reduces a unit when its backward is over, and would not see a weight's gradient that comes later: a
        schedule that splits backwards (``awaited``) is refused.
        """
        assert awaited is None, "weight gradients are put off, which FSDP2 cannot know"
        self._set(self._stages[stage], last=True)

    def finish(self) -> None:
        """Complete every sum of the step: afterwards the shards hold gradients of the global batch."""
        assert not self._finished, "finish() comes once a step; call zero_() before the next one"
        self.wait_parameters()
        for shard in self.buckets:
            gradient = self._parameters[shard.name].grad
            shard.gradient = torch.zeros_like(shard.local) if gradient is None else _local(gradient)
        sum_over(lambda shard: shard.reduction.data.replicas, self.buckets)
        sum_over(lambda shard: shard.reduction.tensor, self.buckets)
        sum_over(lambda shard: shard.reduction.tied, sorted(self.buckets, key=lambda shard: shard.name))
        self._finished = True

    def zero_(self) -> None:
        """Clear all gradients for the next step."""
        for shard in self.buckets:
            shard.gradient = shard.rounded = self._parameters[shard.name].grad = None
        self._begin()

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained parameter's gradient on this rank by global name, after :meth:`finish`.

        They are put together at each call, a collective of all data ranks: for looking at gradients.
        """
        return ((shard.name, shard.whole(shard.local_gradients)) for shard in self.buckets)

    def weights(self) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """This rank's shard of each parameter by global name; rounded copies where modules use a rounding."""
        self.wait_parameters()
        for shard in self._shards.values():
            shard.rounded = shard.local.to(shard.compute) if shard.is_rounded else None
        return (pair for shard in self._shards.values() for pair in shard.parts(shard.as_used))

    @torch.no_grad()
    def copy_model_to_main(self, names: Collection[str] | None = None) -> None:
        """Take masters (those of ``names``) from the copies that :meth:`weights` gave last."""
        for shard in self._shards.values():
            if shard.rounded is not None and (names is None or shard.name in names):
                shard.local.copy_(shard.rounded)

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


def _gather_ahead(
    units: Sequence[nn.Module], stage: nn.Module, inside: Mapping[nn.Module, Sequence[nn.Module]]
) -> None:
    """Let each unit, in order of use, gather the next one during its forward and the one before during its backward.

    FSDP2 itself takes the one whose forward came before, which with several microbatches is the end of another one:
    gathered for nothing. What is cut inside of a unit is gathered with it, called or not.
    """
    cut = [cast(FSDPModule, part) for part in (*units, stage)]
    for before, part in zip([cut[0], *cut], cut, strict=False):
        part.set_modules_to_backward_prefetch([before])
    following = {unit: [after] for unit, after in pairwise(cut[:-1])}
    for part in cut:
        kept = [cast(FSDPModule, unit) for unit in inside[cast(nn.Module, part)]]
        part.set_modules_to_forward_prefetch([*kept, *following.get(part, ())])


class _Cutter:
    """Applies ``fully_shard``, with one dtype of computation in each of its groups.

    Args:
        shard: the ranks among which parameters are cut.
        device: where they are.
        compute: the dtype in which modules use each parameter that is still whole.
        reduce_dtype: the dtype in which gradients travel.
    """

    def __init__(
        self,
        shard: AxisGroup,
        device: torch.device,
        compute: Mapping[nn.Parameter, torch.dtype],
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self._shard, self._compute, self._reduce_dtype = shard, compute, reduce_dtype
        self._mesh = DeviceMesh.from_group(cast(dist.ProcessGroup, shard.group), device.type)

    def cut(self, part: nn.Module, *, reshard_after_forward: bool) -> list[nn.Module]:
        """Cut what is still whole in a part; modules in it that are kept in a higher precision are units there.

        Returns:
            Those modules.
        """
        dtypes, kept = self._dtypes(part), []
        if len(dtypes) > 1:
            widest = max(dtypes, key=lambda dtype: dtype.itemsize)
            for module in list(part.modules()):
                if module is not part and self._dtypes(module, recurse=False) == {widest}:
                    self._apply(module, reshard_after_forward)
                    kept.append(module)
        self._apply(part, reshard_after_forward)
        return kept

    def _dtypes(self, part: nn.Module, *, recurse: bool = True) -> set[torch.dtype]:
        return {self._compute[p] for p in part.parameters(recurse) if p in self._compute}

    def _apply(self, part: nn.Module, reshard_after_forward: bool) -> None:
        dtypes = self._dtypes(part)
        if len(dtypes) > 1:
            raise PlacementError(
                f"{type(part).__qualname__}: parameters of one module in {', '.join(sorted(map(str, dtypes)))} cannot "
                "be cut over data ranks; let precision.keep_fp32 match all of them or none"
            )
        compute = next(iter(dtypes), torch.float32)
        policy = MixedPrecisionPolicy(
            param_dtype=compute,
            reduce_dtype=torch.promote_types(compute, torch.float32),
            cast_forward_inputs=False,
        )
        cut = fully_shard(
            part,
            mesh=self._mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=partial(_placement, ranks=self._shard.size),
            mp_policy=policy,
            ignored_params={parameter for parameter in part.parameters() if not parameter.numel()},
        )
        if unused := getattr(cut, "set_reduce_scatter_unused_params", None):  # from torch 2.13 on
            unused(True)
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)
        cut.set_custom_all_gather(cast(Any, CountedGather(self._shard)))
        cut.set_custom_reduce_scatter(cast(Any, CountedReduce(self._shard, self._reduce_dtype)))


def _promote_(named: Sequence[tuple[str, nn.Parameter]]) -> dict[nn.Parameter, torch.dtype]:
    """Make trained parameters with elements the masters that they are to be; the dtypes that they had."""
    compute = {parameter: parameter.dtype for _, parameter in named if parameter.numel()}
    for parameter, dtype in compute.items():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
    return compute


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


def _placement(parameter: nn.Parameter, *, ranks: int) -> Shard:
    return Shard(shard_dim(parameter.shape, ranks))


def _local(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the whole of one without elements, sharing its memory."""
    if not x.numel():
        return x.detach()
    assert isinstance(x, DTensor)
    with torch.no_grad():
        return x.to_local()
