"""How many blocks each stage gets."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.errors import ConfigError
from megastack.models.stages import split_layers


@pytest.mark.parametrize(("layers", "stages"), [(80, 32), (40, 24), (80, 16), (48, 12), (5, 4), (1, 1)])
def test_every_layer_is_placed(layers: int, stages: int) -> None:
    counts = split_layers(layers, stages, first_cost=0.2, last_cost=1.7)
    assert sum(counts) == layers and len(counts) == stages and min(counts) >= 1


def test_alike_stages_get_alike_shares() -> None:
    assert split_layers(48, 12, first_cost=0.0, last_cost=0.5) == [4] * 12
    assert split_layers(10, 4, first_cost=0.0, last_cost=0.0) == [2, 2, 3, 3], "early stages keep more activations"


def test_head_and_embedding_count() -> None:
    assert split_layers(16, 4, first_cost=1.0, last_cost=3.0) == [4, 5, 5, 2]
    assert split_layers(16, 4, first_cost=10.0, last_cost=30.0, block_cost=10.0) == [4, 5, 5, 2]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(0, 5), st.floats(0, 6), st.floats(0, 6))
def test_no_other_split_has_a_cheaper_heaviest_stage(stages: int, more: int, first: float, last: float) -> None:
    layers = stages + more

    def heaviest(counts: tuple[int, ...]) -> float:
        costs = [float(count) for count in counts]
        costs[0] += first
        costs[-1] += last
        return max(costs)

    every = (c for c in product(range(1, layers + 1), repeat=stages) if sum(c) == layers)
    ours = tuple(split_layers(layers, stages, first_cost=first, last_cost=last))
    assert heaviest(ours) <= min(map(heaviest, every)) + 1e-9


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (0, 1), (4, 0)])
def test_fewer_blocks_than_stages_are_refused(layers: int, stages: int) -> None:
    with pytest.raises(ConfigError, match=f"model.layers={layers}: .*{stages} stages"):
        split_layers(layers, stages, first_cost=0.0, last_cost=0.0)
