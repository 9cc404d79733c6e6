"""Perturb parameters whose initial values hide errors: a bias of zero hides a bias that is added twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megastack.checkpoint.state import StateItem, items_of
from megastack.mesh.mesh import Mesh
from megastack.placement.module import placements_of
from megastack.placement.placement import Normal, Placement
from megastack.random import counter_normal

SEED = 1234


def perturb_(module: nn.Module, mesh: Mesh, *, seed: int = SEED, std: float = 0.1) -> None:
    """Add counter-based noise, the same on every layout, to every parameter whose initial values are constant."""
    placements = placements_of(module)
    items = items_of("model", module.named_parameters(), placements, mesh)
    perturb_items_(items, placements, seed=seed, std=std)


@torch.no_grad()
def perturb_items_(
    items: Sequence[StateItem], placements: Mapping[str, Placement], *, seed: int = SEED, std: float = 0.1
) -> None:
    """:func:`perturb_` for weights as items, of which a rank may hold any number of boxes; buffers do not change."""
    for item in items:
        name = item.name.partition("/")[2]
        placement = placements.get(name)
        if placement is None or (isinstance(placement.init, Normal) and placement.init.std):
            continue
        for box, part in item.boxes:
            noise = counter_normal(seed, f"{name}/noise", item.shape, box, std=std, dtype=part.dtype)
            part += noise.to(part.device)
