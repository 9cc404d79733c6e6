"""Initial values are independent of the layout: any sharding holds the values of one rank, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megastack.errors import PlacementError
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import local_box, local_shape
from megastack.placement.module import fill_
from megastack.placement.placement import Initialiser, Normal, Ones, Placement, Shard, Zeros


def local_values(
    placement: Placement, mesh_shape: MeshShape, tp: int, *, seed: int = 0, name: str = "w", dtype=torch.float32
) -> Tensor:
    """The initial values of the rank at this tp coordinate, in memory that held other values before."""
    tensor = torch.full(local_shape(placement, mesh_shape), 1e30, dtype=dtype)
    fill_(tensor, placement, mesh_shape, {Axis.TP: tp}, seed=seed, name=name)
    return tensor


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Placement, int]:
    copies, parts = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 2), (4, 1)]))
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    padded = list(shape)
    padded[dim] = -(-(shape[dim] + draw(st.integers(0, 5))) // parts) * parts
    init = draw(st.sampled_from([Normal(0.02), Normal(1.0), Ones(), Zeros()]))
    return Placement(tuple(shape), {Axis.TP: Shard(dim, copies)}, init=init, padded_shape=tuple(padded)), copies * parts


@given(shardings(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_every_sharding_holds_the_values_of_one_rank(case: tuple[Placement, int], dtype: torch.dtype) -> None:
    placement, tp = case
    whole = local_values(Placement(placement.shape, init=placement.init), MeshShape(), 0, dtype=dtype)
    for coordinate in range(tp):
        local = local_values(placement, MeshShape(tp=tp), coordinate, dtype=dtype)
        box = local_box(placement, MeshShape(tp=tp), {Axis.TP: coordinate})
        corner = tuple(slice(size) for size in box.size)
        assert torch.equal(local[corner], whole[box.slices])
        local[corner] = 0
        assert not local.any(), "padding must be zero"


def test_the_shards_of_a_weight_differ_and_have_its_deviation() -> None:
    placement = Placement((64, 64), {Axis.TP: Shard(0)}, init=Normal(0.02))
    shards = [local_values(placement, MeshShape(tp=4), tp) for tp in range(4)]
    for one, other in itertools.combinations(shards, 2):
        assert (one == other).double().mean() < 0.01
    assert math.isclose(torch.cat(shards).std().item(), 0.02, rel_tol=0.1)


def test_copies_of_a_shard_are_identical() -> None:
    placement = Placement((2, 8), {Axis.TP: Shard(0, copies=2)})
    shards = [local_values(placement, MeshShape(tp=4), tp) for tp in range(4)]
    assert torch.equal(shards[0], shards[1]) and torch.equal(shards[2], shards[3])
    assert not torch.equal(shards[0], shards[2])


def test_layers_of_one_shape_differ_by_name_and_runs_by_seed() -> None:
    placement = Placement((32, 32))
    streams = [(0, "blocks.0.mlp.up.weight"), (0, "blocks.1.mlp.up.weight"), (1, "blocks.0.mlp.up.weight")]
    values = [local_values(placement, MeshShape(), 0, seed=seed, name=name) for seed, name in streams]
    for one, other in itertools.combinations(values, 2):
        assert (one == other).double().mean() < 0.01


@pytest.mark.parametrize(("init", "value"), [(Ones(), 1.0), (Zeros(), 0.0)])
def test_constants_fill_the_whole_shard(init: Initialiser, value: float) -> None:
    assert (local_values(Placement((4, 3), {Axis.TP: Shard(0)}, init=init), MeshShape(tp=2), 1) == value).all()


def test_a_parameter_that_requires_a_gradient_is_filled_without_a_graph() -> None:
    parameter = torch.nn.Parameter(torch.full((3,), 7.0))
    fill_(parameter, Placement((3,), init=Ones()), MeshShape(), {Axis.TP: 0}, seed=0, name="w")
    assert parameter.is_leaf and parameter.tolist() == [1.0, 1.0, 1.0]


def test_meta_and_fake_tensors_are_accepted() -> None:
    placement = Placement((1 << 20, 1 << 20), padded_shape=(1 << 21, 1 << 20))
    fill_(torch.empty((1 << 21, 1 << 20), device="meta"), placement, MeshShape(), {Axis.TP: 0}, seed=0, name="w")
    with FakeTensorMode():
        fill_(torch.empty(1 << 21, 1 << 20), placement, MeshShape(), {Axis.TP: 0}, seed=0, name="w")


def test_a_tensor_of_another_mesh_is_an_error() -> None:
    placement = Placement((8, 2), {Axis.TP: Shard(0)})
    with pytest.raises(PlacementError, match=r"w: its local shape is \(8, 2\), but on tp2 it is \(4, 2\)"):
        fill_(torch.empty(8, 2), placement, MeshShape(tp=2), {Axis.TP: 0}, seed=0, name="w")
