"""The pipeline stages of a configuration and their schedule; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from megastack.config.layout_rules import chosen_schedule
from megastack.config.schema import TrainConfig
from megastack.mesh.shape import MeshShape
from megastack.models.profile import unit_costs
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.registry import build_schedule
from megastack.pipeline.split import split_layers


@dataclass(frozen=True)
class StageSlice:
    """The part of the model that one stage holds."""

    layers: range
    embedding: bool
    head: bool


def stage_slices(config: TrainConfig, stages: int) -> list[StageSlice]:
    """The slice of each stage, from ``parallel.layers_per_stage`` if that is set, else balanced by cost."""
    counts = config.parallel.layers_per_stage or _balanced(config, stages)
    ends = list(accumulate(counts))
    return [
        StageSlice(range(end - count, end), embedding=stage == 0, head=stage == stages - 1)
        for stage, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def _balanced(config: TrainConfig, stages: int) -> list[int]:
    costs = unit_costs(config)
    return split_layers(
        config.model.layers, stages, first_cost=costs.first, last_cost=costs.last, block_cost=costs.block
    )


def configured_schedule(config: TrainConfig, shape: MeshShape) -> Schedule:
    """The pipeline schedule of a valid configuration; one rank has a schedule of one stage."""
    name, options = chosen_schedule(config.schedule)
    microbatches = config.batch.global_size // (config.batch.micro_size * shape.dp)
    return build_schedule(name, shape.pp, config.schedule.chunks, microbatches, **options)
