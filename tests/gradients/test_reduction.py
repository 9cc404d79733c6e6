"""Which ranks a gradient is summed over, read from its placement."""

import pytest
import torch

from megastack.comm.collectives import all_reduce
from megastack.errors import PlacementError
from megastack.gradients.reduction import reduction_of, tied_groups
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


def test_on_one_rank_all_placements_reduce_alike() -> None:
    mesh = Mesh.single()
    found = {reduction_of(name, placement, mesh, {}) for name, placement in PLACEMENTS.items()}
    (reduction,) = found
    assert (reduction.tensor, reduction.tied, reduction.whole, reduction.is_owner) == (None, None, False, True)
    assert reduction.data.shard.size == reduction.data.replicas.size == 1


def groups_by_placement() -> dict[str, tuple[object, ...]]:
    mesh = Mesh.from_environment(MeshShape(tp=4))
    found = {name: reduction_of(name, placement, mesh, {}) for name, placement in PLACEMENTS.items()}
    all_reduce(torch.zeros(1), mesh.world)  # nobody leaves while another still joins its group
    return {name: (r.tensor.ranks if r.tensor else (), r.whole, r.is_owner) for name, r in found.items()}


def test_the_ranks_of_each_sum_and_who_counts() -> None:
    for rank, found in enumerate(run_ranks(groups_by_placement, 4)):
        copies = (0, 1) if rank < 2 else (2, 3)
        assert found == {
            "cut": ((), False, True),
            "copied": (copies, False, rank in (0, 2)),
            "whole": ((), True, rank == 0),
            "partial": ((0, 1, 2, 3), True, rank == 0),
        }


def shared_names(held: dict[int, tuple[str, ...]]) -> dict[str, tuple[int, ...]] | str:
    mesh = Mesh.from_environment(MeshShape(pp=4))
    shape = (3,) if mesh.rank < 3 else (3, 1)
    parameters = [(name, torch.zeros(shape if name == "b" else (2,))) for name in held[mesh.rank]]
    try:
        return {name: group.ranks for name, group in tied_groups(parameters, mesh).items()}
    except PlacementError as error:
        return str(error)


def test_tied_parameters_are_found_by_their_common_name_and_shape() -> None:
    held = {0: ("a", "b"), 1: ("c",), 2: ("d", "c"), 3: ("b", "a")}
    assert run_ranks(shared_names, 4, held) == [{"a": (0, 3)}, {"c": (1, 2)}, {"c": (1, 2)}, {"a": (0, 3)}]


def test_sets_of_stages_that_overlap_are_refused_on_every_rank() -> None:
    held = {0: ("a",), 1: ("c",), 2: (), 3: ("a", "c")}
    for message in run_ranks(shared_names, 4, held):
        assert "(0, 3)" in message and "(1, 3)" in message


def expert_axis() -> str:
    mesh = Mesh.from_environment(MeshShape(dp=2, ep=2))
    with pytest.raises(PlacementError) as caught:
        reduction_of("experts.weight", Placement((8,), {Axis.EP: Shard(0)}), mesh, {})
    return str(caught.value)


def test_an_axis_that_is_not_available_is_refused_by_name() -> None:
    assert all("experts.weight" in message and "ep=1" in message for message in run_ranks(expert_axis, 2))
