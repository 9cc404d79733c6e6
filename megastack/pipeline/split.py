"""How many blocks each pipeline stage holds.

The first stage also holds the embedding and the last one the head, which can cost as much as several blocks; so an even
split of the blocks is not an even split of the time. Every block is placed: the counts always sum to the depth.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

from megastack.errors import ConfigError, Violation


def split_layers(
    layers: int, stages: int, *, first_cost: float, last_cost: float, block_cost: float = 1.0
) -> list[int]:
    """The blocks of each stage that make the most expensive stage as cheap as possible; each has at least one.

    Blocks are alike, so handing them out one by one, each to the stage that is cheapest so far, is optimal. Between
    equal stages the later one is first, since early stages keep more activations.

    Args:
        layers: the depth of the model.
        stages: pp · chunks.
        first_cost: what the first stage does beside its blocks (embedding).
        last_cost: what the last stage does beside its blocks (norm, head, loss).
        block_cost: one block, in the same unit.

    Raises:
        ConfigError: when there are fewer blocks than stages.
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
