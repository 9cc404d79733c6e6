"""A model whose parameters are used on some data ranks and in some microbatches only, whole units among them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.fully_shard import FullyShardedGradients
from megastack.gradients.interface import Gradients
from megastack.gradients.norm import grad_norm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.optim.optimizer import build_optimizer
from megastack.placement.module import ParallelModule, ReshardPolicy
from megastack.placement.placement import Placement
from tests.gradients.test_bucket import OPTIONS

Uses = dict[str, set[tuple[int, int]]]
"""By branch, the ranks and microbatches that use it; a branch that is not named is used in all."""


class Branch(ParallelModule):
    """Two weights of which a forward uses one, or both."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"left": Placement((4, 4)), "right": Placement((3,))}

    def forward(self, x: Tensor, left: bool, right: bool) -> Tensor:
        if left:
            x = x + x @ self.left
        return x * (1 + self.right.sum()) if right else x


class Branching(ParallelModule):
    """Units that are called or not, and a weight of its own."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.units = nn.ModuleDict({name: Branch(mesh) for name in ("first", "second", "third")})
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"own": Placement((4,)), "idle": Placement((2,))}

    def forward(self, x: Tensor, at: tuple[int, int], uses: Uses) -> Tensor:
        def used(name: str) -> bool:
            return name not in uses or at in uses[name]

        for name, unit in self.units.items():
            if used(name):
                x = unit(x, used(f"{name}.left"), used(f"{name}.right"))
        if used("own"):
            x = x * self.own
        return x.square().sum()


def stepped(
    shape: MeshShape, uses: Uses, sharded: dict[str, object] | None, freeze: str | None = None
) -> list[dict[str, Tensor]]:
    """The gradients, norm and updated weights of two steps of two microbatches each."""
    mesh = Mesh.from_environment(shape)
    model = Branching(mesh)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(freeze is None or freeze not in name)
    units = dict.fromkeys(model.units.values(), ReshardPolicy.AFTER_FORWARD)
    gradients: Gradients
    if sharded is None:
        gradients = GradientBuckets([model], mesh)
    else:
        gradients = FullyShardedGradients([model], mesh, units=units, **sharded)  # type: ignore[arg-type]
    optimizer = build_optimizer(gradients, OPTIONS["adamw"])
    found = []
    for step in range(2):
        gradients.zero_()
        for micro in range(2):
            if micro:
                gradients.mark_last_backward(0)
            x = torch.linspace(-1, 1, 8).view(2, 4) + mesh.rank + micro / 4 + step / 8
            model(x, (mesh.rank, micro), uses).backward()
        gradients.finish()
        found.append({name: x.clone() for name, x in gradients.named_gradients()})
        found[-1]["norm"] = grad_norm(gradients, mesh)
        optimizer.step(0.1)
    return found
