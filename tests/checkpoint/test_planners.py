"""The plan of a save: each box is written once, balanced by bytes; invalid plans are errors."""

from collections.abc import Sequence

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from megastack.checkpoint.planners import BoxSavePlanner
from megastack.checkpoint.state import State, StateItem
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box


def plan(ranks: Sequence[Sequence[StateItem]]) -> list[SavePlan]:
    planners = [BoxSavePlanner(State(items)) for items in ranks]
    for planner in planners:
        planner.set_up_planner({})
    return planners[0].create_global_plan([planner.create_local_plan() for planner in planners])[0]


def shard(name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> StateItem:
    return StateItem(name, shape, ((Box(offset, size), torch.zeros(size)),))


def written(plans: list[SavePlan]) -> list[tuple[str, tuple[int, ...]]]:
    return [(item.index.fqn, tuple(item.index.offset or ())) for plan in plans for item in plan.items]


def test_replicas_are_written_once_and_balanced_by_bytes() -> None:
    items = [StateItem.replicated(name, torch.zeros(size)) for name, size in (("a", 8), ("b", 4), ("c", 4))]
    plans = plan([items, items])
    assert sorted(written(plans)) == [("a", (0,)), ("b", (0,)), ("c", (0,))]
    loads = [sum(item.tensor_data.chunk.sizes[0] for item in plan.items if item.tensor_data) for plan in plans]
    assert loads == [8, 8]


def test_replicas_of_shards_on_adjacent_ranks_are_written_once() -> None:
    plans = plan([[shard("kv", (2, 3), (rank // 2, 0), (1, 3))] for rank in range(4)])
    assert sorted(written(plans)) == [("kv", (0, 0)), ("kv", (1, 0))]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[shard("w", (4,), (0,), (2,))], [shard("w", (4,), (3,), (1,))]], "w: boxes hold 3 of the 4"),
        ([[shard("w", (4,), (0,), (3,))], [shard("w", (4,), (2,), (2,))]], "overlap"),
        ([[shard("w", (4,), (0,), (4,))], [shard("w", (4,), (0,), (2,))]], "sizes"),
        ([[shard("w", (4,), (0,), (2,))], [shard("w", (5,), (2,), (2,))]], r"rank 0 has shape \(4,\) float32, rank 1"),
        ([[StateItem("w", (4,), ())], [StateItem("w", (4,), ())]], "w: no rank holds any of it"),
        ([[shard("w", (2,), (0,), (4,))]], "does not lie within"),
    ],
)
def test_boxes_that_do_not_cover_the_tensor_exactly_once_are_an_error(
    ranks: list[list[StateItem]], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan(ranks)


def test_a_dtype_that_differs_between_ranks_is_an_error() -> None:
    other = StateItem("w", (4,), ((Box((2,), (2,)), torch.zeros(2).double()),))
    with pytest.raises(CheckpointError, match="float64"):
        plan([[shard("w", (4,), (0,), (2,))], [other]])


def test_the_assignment_is_deterministic() -> None:
    items = [StateItem.replicated(f"p{index}", torch.zeros(3 + index % 4)) for index in range(20)]
    first, second = (written(plan([items, items, items])) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("values", [[0.0, -0.0], [1.0, float("nan")], [True, False], [2**40, 2**40 + 1]], ids=str)
def test_replicas_that_must_be_identical_are_compared_bitwise(values: list[float]) -> None:
    def item(value: float, replica: str | None) -> StateItem:
        return StateItem("b", (), ((Box((), ()), torch.tensor(value)),), replica)

    one, other = values
    plan([[item(one, "dp0")], [item(one, "dp1")], [item(one, "dp2")]])
    plan([[item(one, None)], [item(other, None)]])
    with pytest.raises(CheckpointError, match=r"b: rank 0 \(dp0\) and rank 2 \(dp2\) hold different values"):
        plan([[item(one, "dp0")], [item(one, "dp1")], [item(other, "dp2")]])


def test_a_tensor_without_elements_can_be_compared() -> None:
    empty = StateItem("b", (0, 3), ((Box((0, 0), (0, 3)), torch.zeros(0, 3)),), "dp0")
    assert written(plan([[empty], [empty]])) == [("b", (0, 0))]
