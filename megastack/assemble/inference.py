"""Pipeline stages for inference, and the generator that uses them."""

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
    """Return stages that share the weights, without sequence parallelism, dropout or recomputation, for any length."""
    parallel = replace(config.parallel, sequence_parallel=False)
    plain = replace(config, parallel=parallel, recompute=RecomputeOptions())
    with torch.device("meta"):
        copies = [
            Decoder(plain, stage.mesh, layers=stage.layers, embedding=stage.has_embedding, head=stage.has_head)
            for stage in stages
        ]
    for copy, stage in zip(copies, stages, strict=True):
        copy.load_state_dict(stage.state_dict(), assign=True)
        share_buffers_(copy, stage)
    return [copy.eval().requires_grad_(False) for copy in copies]


def build_generator(config: TrainConfig, mesh: Mesh, stages: Sequence[Decoder], schedule: Schedule) -> Generator:
    """Build a generator that continues prompts with the current weights of these stages; called on all ranks."""
    return Generator(
        inference_stages(config, stages),
        schedule,
        mesh,
        vocab=config.model.vocab,
        max_positions=longest_text(config),
    )


def longest_text(config: TrainConfig) -> int | None:
    """Return the longest sequence of a model with learned positions; None for other positions, which have no limit."""
    return ModelConfig.of(config).max_positions if config.model.positions == "learned" else None
