"""Gradients, optimizer, loss scale and learning rate of a configuration, for the stages of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from megastack.assemble.stages import DTYPES
from megastack.checkpoint.state import stage_placements
from megastack.comm.objects import all_gather_objects
from megastack.config.schema import TrainConfig
from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.interface import Gradients
from megastack.gradients.parameter_groups import GroupRule, ParameterGroup, assign_groups, freeze
from megastack.gradients.reduction import data_sharding
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.decoder import Decoder
from megastack.optim.loss_scale import INITIAL, LossScale
from megastack.optim.lr import LearningRate
from megastack.optim.update_rules import OptimizerOptions, rule_of


def build_gradients(config: TrainConfig, stages: Sequence[Decoder], mesh: Mesh) -> Gradients:
    """Freeze parameters and build the gradients of the others: flat buckets or FSDP, depending on the ZeRO level.

    Called on all ranks of a pipeline.

    Raises:
        ConfigError: a pattern of ``optim`` matches no parameter of the model.
    """
    local = [name for stage in stages for name, _ in stage.named_parameters()]
    names = {name for found in all_gather_objects(local, mesh[Axis.PP]) for name in found}
    freeze(stages, config.optim.freeze, names=names)
    groups = _parameter_groups(config, stages, names)
    reduce_dtype = DTYPES[config.precision.reduce] if config.precision.reduce else None
    units = {unit: policy for stage in stages for unit, policy in stage.units().items()}
    zero = config.parallel.zero
    if zero.stage < 2 or not data_sharding(mesh, zero=zero.stage, shard_size=zero.shard_size).is_sharded:
        return GradientBuckets(
            stages,
            mesh,
            zero=min(zero.stage, 1),
            shard_size=zero.shard_size,
            units=list(units),
            groups=groups,
            bucket_size=config.parallel.bucket_size,
            reduce_dtype=reduce_dtype,
        )
    from megastack.gradients.fully_shard import FullyShardedGradients  # importing FSDP2 is as slow as importing torch

    return FullyShardedGradients(
        stages,
        mesh,
        shard_size=zero.shard_size,
        units=units,
        gather=zero.gather,
        reduce=zero.reduce,
        groups=groups,
        reduce_dtype=reduce_dtype,
        compiled=[block for stage in stages if stage.compiled_blocks is not None for block in stage.blocks.values()],
    )


def _parameter_groups(config: TrainConfig, stages: Sequence[Decoder], names: set[str]) -> dict[str, ParameterGroup]:
    optim = config.optim
    decays = {name: placement.decay for name, placement in stage_placements(stages).items()}
    rules = [GroupRule(group.pattern, group.lr_scale, group.weight_decay) for group in optim.groups]
    return assign_groups(decays, weight_decay=optim.weight_decay, no_decay=optim.no_decay, rules=rules, names=names)


def optimizer_options(config: TrainConfig) -> OptimizerOptions:
    """Return the optimizer and the settings that all its groups share."""
    optim = config.optim
    betas, offload = (optim.betas[0], optim.betas[1]), config.parallel.zero.offload
    return OptimizerOptions(optim.name, betas, optim.eps, optim.momentum, offload=offload)


def moment_kinds(config: TrainConfig) -> tuple[str, ...]:
    """Return the kinds of moment that a checkpoint of this run holds for each trained parameter."""
    return rule_of(optimizer_options(config)).kinds


def loss_scale(config: TrainConfig, mesh: Mesh) -> LossScale:
    """Build the loss scale: fixed, dynamic (the default for fp16) or none."""
    fixed, dynamic = config.precision.loss_scale, config.precision.compute == "fp16"
    if fixed is not None:
        return LossScale(fixed, device=mesh.device)
    return LossScale(INITIAL if dynamic else None, dynamic=dynamic, device=mesh.device)


def learning_rate(config: TrainConfig) -> LearningRate:
    """Build the learning-rate schedule."""
    lr = config.lr
    return LearningRate(
        schedule=lr.schedule,
        lr=config.optim.lr,
        warmup_steps=lr.warmup_steps,
        total_steps=lr.total_steps or config.run.steps,
        decay_steps=lr.decay_steps,
        floor=lr.floor,
    )
