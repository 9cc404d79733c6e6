"""Which groups a gradient is summed over, opened from the replication of its parameter."""

import pytest
import torch

from megastack.comm.collectives import all_reduce
from megastack.errors import PlacementError
from megastack.gradients.reduction import (
    TrainedParameter,
    agree_over_stages,
    data_sharding,
    make_reductions,
    reduction_of,
)
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.placement import Placement, Shard
from megastack.testing.ranks import run_ranks

PLACEMENTS = {
    "cut": Placement((8,), {Axis.TP: Shard(0)}),
    "copied": Placement((8,), {Axis.TP: Shard(0, copies=2)}),
    "whole": Placement((8,)),
    "partial": Placement((8,), partial=frozenset({Axis.TP})),
}


def test_on_one_rank_all_placements_have_the_same_reduction() -> None:
    mesh = Mesh.single()
    data = data_sharding(mesh)
    (reduction,) = {reduction_of(name, placement, mesh, data) for name, placement in PLACEMENTS.items()}
    assert reduction.partial_over == () and reduction.replication.sharded_over == ()
    assert reduction.is_owner(among_data=True)
    assert reduction.data.shard.size == reduction.data.replicas.size == 1


def groups_by_placement() -> dict[str, tuple[object, ...]]:
    mesh = Mesh.from_environment(MeshShape(tp=4))
    data = data_sharding(mesh)
    found = {name: reduction_of(name, placement, mesh, data) for name, placement in PLACEMENTS.items()}
    all_reduce(torch.zeros(1), mesh.world)  # no rank leaves while another still joins its group
    return {
        name: (r.group_over(Axis.TP).ranks if r.partial_over else (), r.is_owner(among_data=True))
        for name, r in found.items()
    }


def test_the_ranks_of_each_sum_and_the_owner() -> None:
    for rank, found in enumerate(run_ranks(groups_by_placement, 4)):
        copies = (0, 1) if rank < 2 else (2, 3)
        assert found == {
            "cut": ((), True),
            "copied": (copies, rank in (0, 2)),
            "whole": ((), rank == 0),
            "partial": ((0, 1, 2, 3), rank == 0),
        }


def owners_among_data_ranks(zero: int, shard_size: int | None) -> tuple[bool, bool, bool]:
    mesh = Mesh.from_environment(MeshShape(dp=2, cp=2))
    parameter = torch.nn.Parameter(torch.zeros(8))
    reductions = make_reductions([("w", parameter, Placement((8,)))], mesh, zero=zero, shard_size=shard_size)
    reduction = reductions.by_name["w"]
    return reductions.differ_over_data, reduction.is_owner(among_data=True), reduction.is_owner(among_data=False)


@pytest.mark.parametrize(
    ("zero", "shard_size", "differ", "owners"),
    [
        (0, None, False, [True, False, False, False]),
        (1, None, True, [True] * 4),
        (1, 2, True, [True, True, False, False]),
        (1, 1, False, [True, False, False, False]),
    ],
)
def test_each_shard_has_one_owner_among_the_data_ranks(
    zero: int, shard_size: int | None, differ: bool, owners: list[bool]
) -> None:
    assert run_ranks(owners_among_data_ranks, 4, zero, shard_size) == [(differ, owner, True) for owner in owners]


def shared_names(held: dict[int, tuple[str, ...]], differ: str | None) -> tuple[dict[str, tuple[int, ...]], bool] | str:
    mesh = Mesh.from_environment(MeshShape(pp=4))
    shape = (3,) if mesh.rank < 3 else (3, 1)
    trained = [TrainedParameter(name, shape if name == "b" else (2,), name == differ) for name in held[mesh.rank]]
    try:
        return agree_over_stages(trained, mesh)
    except PlacementError as error:
        return str(error)


@pytest.mark.parametrize("differ", [None, "d"])
def test_stages_find_tied_parameters_by_name_and_shape_and_share_a_flag(differ: str | None) -> None:
    held = {0: ("a", "b"), 1: ("c",), 2: ("d", "c"), 3: ("b", "a")}
    tied = [{"a": (0, 3)}, {"c": (1, 2)}, {"c": (1, 2)}, {"a": (0, 3)}]
    assert run_ranks(shared_names, 4, held, differ) == [(each, differ is not None) for each in tied]


def test_sets_of_stages_that_overlap_are_an_error_on_every_rank() -> None:
    held = {0: ("a",), 1: ("c",), 2: (), 3: ("a", "c")}
    for message in run_ranks(shared_names, 4, held, None):
        assert "(0, 3)" in message and "(1, 3)" in message


def expert_axis() -> str:
    mesh = Mesh.from_environment(MeshShape(dp=2, ep=2))
    with pytest.raises(PlacementError) as caught:
        reduction_of("experts.weight", Placement((8,), {Axis.EP: Shard(0)}), mesh, data_sharding(mesh))
    return str(caught.value)


def test_an_axis_that_is_not_available_is_an_error_by_name() -> None:
    assert all("experts.weight" in message and "ep=1" in message for message in run_ranks(expert_axis, 2))
