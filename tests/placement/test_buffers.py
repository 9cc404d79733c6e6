"""Buffers: which are state, how they are declared, and how they move from the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megastack.errors import PlacementError
from megastack.layers.norm import RMSNorm
from megastack.mesh.shape import Axis
from megastack.placement.buffers import persistent_buffers
from megastack.placement.module import ParallelModule, buffer_placements_of, initialise_, placements_of
from megastack.placement.placement import Normal, Ones, Placement, Shard, Zeros
from tests.placement.test_module import mesh_at

SHARDED = Placement((8,), {Axis.TP: Shard(0)}, init=Zeros())


class Owner(ParallelModule):
    """Declares the given placements, and has the buffers that are registered in it."""

    def __init__(self, tp: int = 1, **declared: Placement) -> None:
        super().__init__(mesh_at(tp=tp))
        self.declared = declared

    def placements(self) -> dict[str, Placement]:
        return self.declared


def test_persistent_ones_are_state_under_their_first_name() -> None:
    owner = Owner(tp=2, mean=SHARDED)
    owner.register_buffer("mean", torch.zeros(4))
    owner.register_buffer("count", torch.zeros((), dtype=torch.int64))
    owner.register_buffer("table", torch.zeros(3), persistent=False)
    owner.register_buffer("nothing", None)
    owner.child = nn.BatchNorm1d(2, affine=False)
    owner.again = owner.child
    assert placements_of(owner) == {}
    assert buffer_placements_of(owner) == {
        "mean": SHARDED,
        "count": Placement((), init=Zeros()),
        "child.running_mean": Placement((2,), init=Zeros()),
        "child.running_var": Placement((2,), init=Zeros()),
        "child.num_batches_tracked": Placement((), init=Zeros()),
    }
    assert list(persistent_buffers(owner)) == list(buffer_placements_of(owner))


def test_wrong_declarations_are_errors() -> None:
    owner = Owner(tp=2, whole=SHARDED, sum=Placement((3,), partial=frozenset({Axis.TP})), table=Placement((3,)))
    owner.register_buffer("whole", torch.zeros(8))
    owner.register_buffer("sum", torch.zeros(3))
    owner.register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(PlacementError) as error:
        placements_of(owner)
    assert str(error.value).splitlines() == [
        "table: declared, but the buffer is not persistent and in no checkpoint; drop the one or the other",
        "whole: its local shape is (8,), but its placement (8,) on tp2 gives (4,); "
        "allocate it with local_shape(placement, mesh.shape)",
        "sum: a buffer has no gradient that could be partial; declare it without partial",
    ]


class MeanNorm(RMSNorm):
    """A subclass whose base class creates the declared parameters before the buffer is registered."""

    def __init__(self) -> None:
        super().__init__(4, mesh_at())
        self.register_buffer("mean", torch.full((4,), 2.0))

    def placements(self) -> dict[str, Placement]:
        return super().placements() | {"mean": Placement((4,))}


def test_a_declared_buffer_of_a_subclass_is_not_a_parameter() -> None:
    norm = MeanNorm()
    initialise_(norm, norm.mesh, seed=0)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    assert norm.mean.tolist() == [2.0] * 4
    with pytest.raises(KeyError):
        norm.register_buffer("forward", torch.zeros(1))


def test_those_on_meta_start_at_their_declaration_in_their_own_dtype_and_stay_shared() -> None:
    owner = Owner(tp=2, mean=SHARDED, mask=Placement((3,), init=Ones()))
    with torch.device("meta"):
        owner.register_buffer("mean", torch.ones(4, dtype=torch.float64))
        owner.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
    owner.child = nn.Module()
    owner.child.register_buffer("table", torch.arange(3), persistent=False)
    owner.child.same = nn.Module()
    owner.child.same.register_buffer("table", owner.child.table, persistent=False)
    initialise_(owner, owner.mesh, seed=0, dtype=torch.bfloat16, device="cpu")
    assert torch.equal(owner.mean, torch.zeros(4, dtype=torch.float64))
    assert owner.mask.tolist() == [True] * 3
    assert owner.child.table.tolist() == [0, 1, 2] and owner.child.table is owner.child.same.table


@pytest.mark.parametrize(("init", "said"), [(None, "nothing to fill it"), (Normal(0.02), "is not random")], ids=str)
def test_one_on_meta_that_nothing_can_fill_is_an_error(init: Normal | None, said: str) -> None:
    owner = Owner(**({} if init is None else {"mean": Placement((4,), init=init)}))
    with torch.device("meta"):
        owner.register_buffer("mean", torch.zeros(4))
    with pytest.raises(PlacementError, match=f"mean: a buffer built on the meta device .*{said}"):
        initialise_(owner, owner.mesh, seed=0)
