"""The pipeline stages of a configuration and their schedule; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate

from megastack.config.layout_rules import chosen_schedule
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, Violation
from megastack.mesh.shape import MeshShape
from megastack.models.profile import unit_costs
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.registry import build_schedule


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


def split_layers(
    layers: int, stages: int, *, first_cost: float, last_cost: float, block_cost: float = 1.0
) -> list[int]:
    """Choose the number of blocks of each stage, at least one, to minimise the cost of the most expensive stage.

    The first stage also holds the embedding and the last one the head, which can cost as much as several blocks, so an
    even split of the blocks is not an even split of the time. All blocks cost the same, so assigning them one by one to
    the cheapest stage so far is optimal. Among equal stages the latest is chosen, since early stages keep more
    activations.

    Args:
        layers: the number of blocks of the model.
        stages: pp · chunks.
        first_cost: the cost of the first stage besides its blocks (embedding).
        last_cost: the cost of the last stage besides its blocks (norm, head, loss).
        block_cost: the cost of one block.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    if not 1 <= stages <= layers:
        rule = f"cannot give each of {stages} stages (parallel.pp times schedule.chunks) a block"
        legal = ("fewer stages", "list the blocks of each in parallel.layers_per_stage")
        raise ConfigError.of([Violation("model.layers", layers, rule, legal)])
    costs = [block_cost] * stages
    costs[0] += first_cost
    costs[-1] += last_cost
    heap = [(cost, -stage) for stage, cost in enumerate(costs)]
    heapify(heap)
    counts = [1] * stages
    for _ in range(layers - stages):
        cost, stage = heap[0]
        counts[-stage] += 1
        heapreplace(heap, (cost + block_cost, stage))
    return counts


def configured_schedule(config: TrainConfig, shape: MeshShape) -> Schedule:
    """The pipeline schedule of a valid configuration; one rank has a schedule of one stage."""
    name, options = chosen_schedule(config.schedule)
    microbatches = config.batch.global_size // (config.batch.micro_size * shape.dp)
    return build_schedule(name, shape.pp, config.schedule.chunks, microbatches, **options)
