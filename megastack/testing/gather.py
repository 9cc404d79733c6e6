"""Whole tensors from the parts that ranks hold, on the first rank, and whether parts that are held twice agree.

Ranks that hold the same part of a parameter (along dp always, along tp where it is whole or has copies, both ends of a
tied pair) must hold the same bits of it, or they drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megastack.checkpoint.items import StateItem
from megastack.comm.objects import gather_objects
from megastack.mesh.mesh import Mesh

Spread = dict[str, float]
"""By name, the largest difference between two ranks' copies of an element; names without any are absent."""


def gather_whole(items: Sequence[StateItem], mesh: Mesh) -> tuple[dict[str, Tensor], Spread]:
    """The global tensor behind each item by its name without the prefix, and how far copies differ.

    All ranks of the mesh call; the first one gets the result, the others nothing.
    """
    own = [
        (item.name.partition("/")[2], item.shape, box.slices, part.detach().cpu().clone())
        for item in items
        for box, part in item.boxes
    ]
    whole: dict[str, Tensor] = {}
    spread: Spread = {}
    seen: set[tuple[str, str]] = set()
    for name, shape, where, part in (entry for rank in gather_objects(own, mesh.world) for entry in rank):
        target = whole.setdefault(name, torch.zeros(shape, dtype=part.dtype))
        key = (name, str(where))
        if key in seen and not torch.equal(target[where], part):
            spread[name] = max(spread.get(name, 0.0), float((target[where] - part).abs().max()))
        elif key not in seen:
            seen.add(key)
            target[where] = part
    return whole, spread
