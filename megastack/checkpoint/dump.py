"""Gradients and weights of chosen steps as whole tensors in one file, for comparing runs on different layouts.

Meant for small models: every rank sends its part to every other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megastack.checkpoint.items import StateItem
from megastack.comm.objects import all_gather_objects
from megastack.mesh.mesh import Mesh


def gather_items(items: Sequence[StateItem], mesh: Mesh) -> dict[str, Tensor]:
    """The global tensor behind each item, by name, on every rank; all ranks of the mesh call."""
    own = [(item.name, item.shape, box, part.detach().cpu().clone()) for item in items for box, part in item.boxes]
    whole: dict[str, Tensor] = {}
    for name, shape, box, part in (entry for rank in all_gather_objects(own, mesh.world) for entry in rank):
        target = whole.setdefault(name, torch.zeros(shape, dtype=part.dtype))
        target[tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))] = part
    return whole


def write_dump(path: Path, items: Sequence[StateItem], mesh: Mesh) -> None:
    """Write the global tensors of all items to one safetensors file, from the first rank; all ranks call."""
    whole = gather_items(items, mesh)
    if mesh.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: x.contiguous() for name, x in sorted(whole.items())}, path)
