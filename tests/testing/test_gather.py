"""Whole tensors gathered from parts, and replicas that differ."""

from __future__ import annotations

import torch

from megastack.checkpoint.state import StateItem
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import Box
from megastack.testing.gather import gather_whole
from megastack.testing.ranks import run_ranks


def gathered(disturbed: float) -> tuple[dict[str, list[float]], dict[str, float]]:
    """A vector of four sharded over tp and replicated over dp; one rank's part is disturbed."""
    mesh = Mesh.from_environment(MeshShape(dp=2, tp=2))
    tp_rank = mesh.coordinates[Axis.TP]
    part = torch.tensor([0.0, 1.0]) + 2 * tp_rank + (disturbed if mesh.rank == 3 else 0)
    sharded = StateItem("model/sharded", (4,), ((Box((2 * tp_rank,), (2,)), part),))
    single = StateItem("model/one.rank", (1,), ((Box((0,), (1,)), torch.tensor([7.0])),))
    whole, spread = gather_whole([sharded, *([single] if mesh.rank == 2 else [])], mesh)
    return {name: x.tolist() for name, x in whole.items()}, spread


def test_parts_are_gathered_on_the_first_rank_only() -> None:
    whole = {"sharded": [0, 1, 2, 3], "one.rank": [7]}
    assert run_ranks(gathered, 4, 0.0) == [(whole, {}), ({}, {}), ({}, {}), ({}, {})]


def test_replicas_that_differ_are_named_with_their_distance() -> None:
    assert run_ranks(gathered, 4, 0.5)[0][1] == {"sharded": 0.5}
