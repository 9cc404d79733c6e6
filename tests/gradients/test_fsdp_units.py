"""FSDP units: the sharded dim, and ranks that use different parameters (unused ones have a gradient of zero)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megastack.errors import PlacementError
from megastack.gradients.fsdp_units import shard_dim
from megastack.gradients.fully_shard import FullyShardedGradients
from megastack.layers.norm import RMSNorm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.optim.main_parameters import set_dtypes_
from megastack.placement.module import ParallelModule, ReshardPolicy
from megastack.placement.placement import Placement
from megastack.testing.ranks import run_ranks
from tests.gradients.branching_model import Uses, stepped


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((8, 3, 6), 4, 0), ((2, 6, 8), 4, 2), ((3, 8, 5), 4, 1), ((7,), 4, 0), ((3, 5), 2, 0), ((2, 4, 8), 4, 2)],
)
def test_the_sharded_dim(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    assert shard_dim(shape, ranks) == dim


EVERY = {(rank, micro) for rank in range(4) for micro in range(2)}
FIRST_RANK, FIRST_MICRO = {(0, 0), (0, 1)}, {(rank, 0) for rank in range(4)}
CASES: dict[str, Uses] = {
    "a weight on one rank": {"second.left": FIRST_RANK, "third.right": EVERY - FIRST_RANK},
    "a weight in the first microbatch": {"second.left": FIRST_MICRO, "own": EVERY - FIRST_MICRO},
    "a weight once": {"second.left": {(1, 0)}, "own": {(0, 1)}, "first.right": {(1, 1)}},
    "a weight nowhere": {"first.left": set(), "own": set()},
    "all weights of a unit on one rank": {"second.left": FIRST_RANK, "second.right": FIRST_RANK},
    "the first unit's weights on one rank": {"first.left": FIRST_RANK, "first.right": FIRST_RANK},
    "a unit on one rank": {"second": FIRST_RANK},
    "the first unit on one rank": {"first": FIRST_RANK},
    "the last unit in one microbatch": {"third": FIRST_MICRO},
    "a unit once": {"second": {(1, 1)}, "third": {(0, 0)}},
    "two units in a row on one rank": {"first": FIRST_RANK, "second": FIRST_RANK},
    "a unit nowhere": {"second": set()},
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_buckets(name: str) -> None:
    plain = run_ranks(stepped, 2, MeshShape(dp=2), CASES[name], None)
    for gather in ("step", "microbatch"):
        for reduce in ("step", "microbatch"):
            sharded = run_ranks(stepped, 2, MeshShape(dp=2), CASES[name], {"gather": gather, "reduce": reduce})
            for before, after in zip(plain, sharded, strict=True):
                torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_with_shard_groups_and_frozen_weights() -> None:
    uses = CASES["a weight on one rank"] | {"first": {(3, 0)}}
    plain = run_ranks(stepped, 4, MeshShape(dp=4), uses, None, "second.right")
    sharded = run_ranks(stepped, 4, MeshShape(dp=4), uses, {"shard_size": 2}, "second.right")
    for before, after in zip(plain, sharded, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


class Kept(ParallelModule):
    """A unit with a norm in fp32, which a rank may skip."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.norm = RMSNorm(4, mesh)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"weight": Placement((4, 4))}

    def forward(self, x: Tensor, normed: bool) -> Tensor:
        x = self.norm(x.float()).to(x.dtype) if normed else x
        return x @ self.weight


class KeptStage(ParallelModule):
    """A stage of two such units."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.units = nn.ModuleList(Kept(mesh) for _ in range(2))
        set_dtypes_(self, torch.bfloat16, ["norm"])

    def forward(self, x: Tensor, normed: bool) -> Tensor:
        first, last = self.units
        return last(first(x, True), normed).float().square().sum()


def error_of_a_skipped_norm(rank: int) -> str:
    """The error of a forward in which one rank skips a norm."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    stage = KeptStage(mesh)
    units = dict.fromkeys(stage.units, ReshardPolicy.AFTER_FORWARD)
    gradients = FullyShardedGradients([stage], mesh, units=units, gather="microbatch")
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    gradients.mark_last_backward(0)
    stage(x, True).backward()
    gradients.finish()
    assert all(float(gradient.abs().max()) for _, gradient in gradients.named_gradients())
    try:
        stage(x, mesh.rank != rank)
    except PlacementError as error:
        return str(error)
    return ""


def test_a_module_in_another_dtype_that_a_rank_skips_is_named_there() -> None:
    messages = run_ranks(error_of_a_skipped_norm, 2, 1)
    assert (
        messages[0] == "" and "units.1.norm: not called in this forward" in messages[1] and "keep_fp32" in messages[1]
    )
