"""Parameters of one model with different data groups, as experts have: sums, shards and the norm follow each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.fully_shard import FullyShardedGradients
from megastack.gradients.interface import Gradients
from megastack.gradients.norm import grad_norm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.optim.optimizer import build_optimizer
from megastack.optim.update_rules import OptimizerOptions
from megastack.placement.module import ParallelModule, ReshardPolicy
from megastack.placement.placement import Ones, Placement, Shard
from megastack.testing.ranks import run_ranks
from tests.placement.test_replication import OverContext


class Vector(ParallelModule):
    """One parameter, which the output is a sum of."""

    def __init__(self, mesh: Mesh, placement: Placement) -> None:
        super().__init__(mesh)
        self.placement = placement
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"weight": self.placement}

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class Block(ParallelModule):
    """A parameter whose data group is dp·cp, and one sharded over cp whose data group is dp alone."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.dense = Vector(mesh, Placement((8, 2), init=Ones()))
        self.expert = Vector(mesh, OverContext((8, 4), {Axis.CP: Shard(0)}, init=Ones()))

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.dense(x))


class Stage(nn.Module):
    """A stage with one unit."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.block = Block(mesh)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def stepped(level: int, policy: ReshardPolicy) -> tuple[dict[str, Tensor], float, float, dict[str, int]]:
    """Gradients and norm of a step, one weight of the expert after its update, and the elements of the local shards."""
    mesh = Mesh.from_environment(MeshShape(dp=2, cp=2))
    stage = Stage(mesh)
    gradients: Gradients
    if level < 2:
        gradients = GradientBuckets([stage], mesh, zero=level)
    else:
        gradients = FullyShardedGradients([stage], mesh, units={stage.block: policy})
    gradients.mark_last_backward(0)
    (stage(torch.zeros(())) * (mesh.rank + 1.0)).backward()
    gradients.finish()
    found = {name: gradient.clone() for name, gradient in gradients.named_gradients()}
    norm = grad_norm(gradients, mesh).item()
    build_optimizer(gradients, OptimizerOptions("sgd")).step(0.5)
    gradients.wait_parameters()
    weights = {name: parts[0][1] for name, parts in gradients.weights() if parts}
    sizes = {
        name: sum(x.numel() for _, x in parts)
        for shard in gradients.buckets
        for name, parts in shard.parts(shard.local_parameters)
    }
    return found, norm, weights["block.expert.weight"].flatten()[0].item(), sizes


@pytest.mark.parametrize(
    ("level", "policy"),
    [(0, ReshardPolicy.AFTER_FORWARD), (1, ReshardPolicy.AFTER_FORWARD)]
    + [(3, policy) for policy in (ReshardPolicy.AFTER_FORWARD, ReshardPolicy.WITH_STAGE)],
)
def test_each_parameter_is_reduced_and_sharded_over_its_own_data_group(level: int, policy: ReshardPolicy) -> None:
    dense, experts = 1 + 2 + 3 + 4, (1 + 3, 2 + 4)  # dp is outside of cp
    norm = 4 * math.sqrt(dense**2 + experts[0] ** 2 + experts[1] ** 2)  # of 16 elements each
    for rank, (gradients, found, weight, sizes) in enumerate(run_ranks(stepped, 4, level, policy)):
        expert = experts[rank % 2]
        assert torch.equal(gradients["block.dense.weight"], torch.full((8, 2), float(dense)))
        assert torch.equal(gradients["block.expert.weight"], torch.full((4, 4), float(expert)))
        assert found == pytest.approx(norm, rel=1e-6)
        assert weight == 1 - 0.5 * expert
        shares = (1, 1) if level == 0 else (4, 2)
        assert (sizes["block.dense.weight"], sizes["block.expert.weight"]) == (16 // shares[0], 16 // shares[1])
