"""Who holds replicas of a parameter, and who owns them: pure values of a placement, a mesh shape and coordinates."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given

from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import local_box, local_shape
from megastack.placement.placement import (
    Placement,
    Replication,
    Shard,
    Subgroup,
    is_replicated_over_data,
    replication_of,
)
from tests.placement.test_boxes import sharded

SHAPE = MeshShape(pp=2, dp=2, tp=4)


def on(placement: Placement, shape: MeshShape = SHAPE, **at: int) -> Replication:
    return replication_of(placement, shape, shape.coordinates(shape.rank_at(**at)))


def test_a_shard_is_owned_by_every_rank_and_summed_over_the_data_group_only() -> None:
    for tp in range(4):
        found = on(Placement((8,), {Axis.TP: Shard(0)}), tp=tp)
        assert found == Replication((Axis.DP, Axis.CP), (), (Axis.TP,), True)


def test_copies_of_a_shard_are_summed_and_the_first_is_the_owner() -> None:
    kv = Placement((2, 2, 8, 16), {Axis.TP: Shard(0, copies=2)})
    found = [on(kv, tp=tp) for tp in range(4)]
    assert [each.partial_over for each in found[:2]] == [(Subgroup(Axis.TP, (0, 1)),)] * 2
    assert [each.partial_over for each in found[2:]] == [(Subgroup(Axis.TP, (2, 3)),)] * 2
    assert [each.owns_replica for each in found] == [True, False, True, False]


@pytest.mark.parametrize("partial", [False, True])
def test_a_replicated_parameter_is_owned_by_coordinate_0(partial: bool) -> None:
    placement = Placement((4,), partial=frozenset({Axis.TP} if partial else ()))
    found = [on(placement, tp=tp, dp=1) for tp in range(4)]
    assert [each.owns_replica for each in found] == [True, False, False, False]
    assert {each.partial_over for each in found} == {(Subgroup(Axis.TP, (0, 1, 2, 3)),) if partial else ()}
    assert {each.sharded_over for each in found} == {()}


def test_a_tied_parameter_is_summed_over_its_stages_last_and_owned_by_the_first() -> None:
    placement = Placement((4,), partial=frozenset({Axis.TP}))
    found = [replication_of(placement, SHAPE, SHAPE.coordinates(rank), stages=(0, 1)) for rank in range(16)]
    groups = (Subgroup(Axis.TP, (0, 1, 2, 3)), Subgroup(Axis.PP, (0, 1)))
    assert {each.partial_over for each in found} == {groups}
    assert [rank for rank, each in enumerate(found) if each.owns_replica] == [0, 4]  # one on each data rank


def test_on_one_rank_all_placements_are_the_same() -> None:
    whole, cut = Placement((8,)), Placement((8,), {Axis.TP: Shard(0)})
    assert on(whole, MeshShape()) == on(cut, MeshShape()) == Replication((Axis.DP, Axis.CP), (), (), True)


@given(sharded())
def test_each_element_has_one_owner(case: tuple[Placement, MeshShape]) -> None:
    placement, mesh_shape = case
    owners = np.zeros(placement.shape, int)
    for tp in range(mesh_shape.tp):
        at = {Axis.TP: tp}
        owners[local_box(placement, mesh_shape, at).slices] += replication_of(placement, mesh_shape, at).owns_replica
    assert (owners == 1).all()


@dataclass(frozen=True)
class OverContext(Placement):
    """A parameter sharded over cp as experts are over ep: its data group is dp alone."""

    data_axes = (Axis.DP,)
    model_axes = (Axis.CP, Axis.TP)

    def __post_init__(self) -> None:
        """The declaration is not checked: cp is an axis that ordinary placements may not name."""


def test_a_parameter_with_another_data_group_has_its_own_answer() -> None:
    shape = MeshShape(dp=2, cp=2, tp=2)
    expert = OverContext((4, 6), {Axis.CP: Shard(0)}, frozenset({Axis.TP}))
    found = [replication_of(expert, shape, shape.coordinates(rank)) for rank in range(shape.world_size)]
    assert {each.data_axes for each in found} == {(Axis.DP,)}
    assert {each.sharded_over for each in found} == {(Axis.CP,)}
    assert {each.partial_over for each in found} == {(Subgroup(Axis.TP, (0, 1)),)}
    assert local_shape(expert, shape) == (2, 6)
    assert not is_replicated_over_data(expert, shape) and is_replicated_over_data(expert, MeshShape(dp=2, tp=2))
    assert is_replicated_over_data(Placement((4, 6)), shape)
    owners = np.zeros(expert.shape, int)
    for dp, cp, tp in itertools.product(range(2), repeat=3):
        at = shape.coordinates(shape.rank_at(dp=dp, cp=cp, tp=tp))
        owners[local_box(expert, shape, at).slices] += replication_of(expert, shape, at).owns_replica
    assert (owners == shape.dp).all() and owners.sum() == shape.dp * math.prod(expert.shape)
