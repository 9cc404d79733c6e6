"""This rank's pipeline stages, with initial values or with the weights of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megastack.checkpoint.folder import damage_explained
from megastack.checkpoint.load import load
from megastack.checkpoint.state import State, model_items
from megastack.config.schema import TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.compile import CompiledBlocks
from megastack.models.decoder import Decoder
from megastack.models.stages import StageSlice, stage_slices
from megastack.optim.main_parameters import set_dtypes_
from megastack.pipeline.schedule import Schedule
from megastack.placement.module import initialise_

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_stages(config: TrainConfig, mesh: Mesh, schedule: Schedule) -> list[Decoder]:
    """Build this rank's stages with initial values; a rank with both ends of a tied embedding shares the parameter."""
    slices = stage_slices(config, schedule.stages)
    stages = [build_stage(config, mesh, slices[index]) for index in schedule.rank_stages(mesh[Axis.PP].rank)]
    first, last = stages[0], stages[-1]
    if config.model.tied and first is not last and first.has_embedding and last.has_head:
        last.share_embedding(first)
    return stages


def build_stage(config: TrainConfig, mesh: Mesh, part: StageSlice) -> Decoder:
    """Build one stage with initial values in the dtypes of the configuration, whichever rank it belongs to."""
    with torch.device("meta"):
        stage = Decoder(config, mesh, layers=part.layers, embedding=part.embedding, head=part.head)
        set_dtypes_(stage, DTYPES[config.precision.compute], config.precision.keep_fp32)
    initialise_(stage, mesh, config.seed, device=mesh.device)
    return stage


def compile_stages(stages: Sequence[Decoder], mesh: Mesh, schedule: Schedule) -> None:
    """Compile the blocks of a rank's stages for training, at their first forward and backward.

    Raises:
        ConfigError: no compiler for this device is installed.
    """
    compiled = CompiledBlocks(mesh, defers=schedule.splits_backward)
    for stage in stages:
        stage.compiled_blocks = compiled


def load_stages(config: TrainConfig, mesh: Mesh, schedule: Schedule, checkpoint: Path) -> list[Decoder]:
    """Build this rank's stages with the weights of a checkpoint, in the dtypes of the configuration.

    Raises:
        CheckpointError: the checkpoint is corrupt or belongs to another model.
    """
    stages = build_stages(config, mesh, schedule)
    with damage_explained(checkpoint):
        load(checkpoint, State(model_items(stages, mesh)), mesh, weights_only=True, cast=True)
    return stages
