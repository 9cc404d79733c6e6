"""The gradients of a run: buckets or full shards, by the ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.interface import Gradients
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.sharding import ShardingOptions, sharding_of
from megastack.mesh.mesh import Mesh


def shards_parameters(zero: ShardingOptions, mesh: Mesh) -> bool:
    """Whether parameters are cut over data ranks: stages 2 and 3, unless this rank has nobody to share with."""
    return zero.stage >= 2 and sharding_of(mesh, zero.stage, zero.shard_size).shard.size > 1


def build_gradients(
    modules: Sequence[nn.Module],
    mesh: Mesh,
    zero: ShardingOptions,
    *,
    units: Sequence[nn.Module] = (),
    separable: Sequence[nn.Module] = (),
    turning: Sequence[nn.Module] = (),
    unread: Sequence[nn.Module] = (),
    groups: Mapping[str, ParameterGroup] | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Gradients:
    """The gradients of this rank's stages.

    Args:
        modules: the stages in order.
        mesh: the mesh.
        zero: the stage and its choices.
        units: sub-modules that first use their parameters when they are called.
        separable: those of them whose parameters nothing else uses.
        turning: separable ones whose backward follows their forward at once.
        unread: separable ones whose backward reads no parameter.
        groups: the optimizer group of each global name.
        reduce_dtype: the dtype in which gradients are summed over data ranks.
    """
    if not shards_parameters(zero, mesh):
        stage = min(zero.stage, 1)
        return GradientBuckets(
            modules,
            mesh,
            zero=stage,
            shard_size=zero.shard_size,
            units=units,
            groups=groups,
            reduce_dtype=reduce_dtype,
        )
    from megastack.gradients.fully_shard import FullyShardedGradients  # FSDP2 takes as long to import as torch

    return FullyShardedGradients(
        modules,
        mesh,
        shard_size=zero.shard_size,
        units=separable,
        turning=turning,
        unread=unread,
        gather=zero.gather,
        reduce=zero.reduce,
        groups=groups,
        reduce_dtype=reduce_dtype,
    )
