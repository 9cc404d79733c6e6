"""Move parameters off the values that hide faults: a bias of zero hides a bias that is added twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megastack.checkpoint.collect import model_items
from megastack.checkpoint.items import StateItem
from megastack.mesh.mesh import Mesh
from megastack.placement.module import placements_of
from megastack.placement.placement import Normal, Placement
from megastack.random import counter_normal

SEED = 1234


def perturb_(module: nn.Module, mesh: Mesh, *, seed: int = SEED, std: float = 0.1) -> None:
    """Add counter noise to every parameter that starts at one value, the same on every layout."""
    perturb_items_(model_items([module], mesh), placements_of(module), seed=seed, std=std)


@torch.no_grad()
def perturb_items_(
    items: Sequence[StateItem], placements: Mapping[str, Placement], *, seed: int = SEED, std: float = 0.1
) -> None:
    """:func:`perturb_` on weights as checkpoint items: boxes of them, such as the shards of ZeRO 2 and 3."""
    for item in items:
        name = item.name.partition("/")[2]
        init = placements[name].init
        if not isinstance(init, Normal) or init.std == 0:
            for box, part in item.boxes:
                noise = counter_normal(seed, f"{name}/noise", item.shape, box, std=std, dtype=part.dtype)
                part += noise.to(part.device)
