"""Stages that no longer train, and what continues prompts with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megastack.config.schema import RecomputeOptions, TrainConfig
from megastack.inference.generate import Generator
from megastack.mesh.mesh import Mesh
from megastack.models.config import ModelConfig
from megastack.models.decoder import Decoder
from megastack.pipeline.schedule import Schedule
from megastack.placement.buffers import share_buffers_


def inference_stages(config: TrainConfig, stages: Sequence[Decoder]) -> list[Decoder]:
    """Stages that use the same weights on sequences of any length: whole on every tp rank, no dropout, no recompute."""
    parallel = replace(config.parallel, sequence_parallel=False)
    plain = replace(config, parallel=parallel, recompute=RecomputeOptions())
    with torch.device("meta"):
        twins = [
            Decoder(plain, stage.mesh, layers=stage.layers, embedding=stage.has_embedding, head=stage.has_head)
            for stage in stages
        ]
    for twin, stage in zip(twins, stages, strict=True):
        twin.load_state_dict(stage.state_dict(), assign=True)
        share_buffers_(twin, stage)
    return [twin.eval().requires_grad_(False) for twin in twins]


def build_generator(config: TrainConfig, mesh: Mesh, stages: Sequence[Decoder], schedule: Schedule) -> Generator:
    """What continues prompts with the current weights of these stages; all ranks call."""
    return Generator(
        inference_stages(config, stages),
        schedule,
        mesh,
        vocab=config.model.vocab,
        longest=longest_text(config),
    )


def longest_text(config: TrainConfig) -> int | None:
    """Positions that the model has; None where they are computed and there is no last one."""
    return ModelConfig.of(config).max_positions if config.model.positions == "learned" else None
