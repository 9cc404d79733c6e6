"""Gather whole tensors on the first rank from the parts that ranks hold, and compare replicas.

Replicas of a parameter (over dp always, over tp if it is whole or has copies, and at both ends of a tied pair) must be
bitwise identical, or they drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from megastack.checkpoint.state import StateItem
from megastack.comm.objects import gather_objects
from megastack.mesh.mesh import Mesh

Spread = dict[str, float]
"""By name, the largest difference between replicas; identical replicas are absent."""


def gather_whole(items: Sequence[StateItem], mesh: Mesh) -> tuple[dict[str, Tensor], Spread]:
    """Gather the global tensor of each item. Must be called on all ranks of the mesh.

    Returns:
        The tensors by item name without the prefix, and how far replicas differ; empty except on the first rank.
    """
    held = [(item, box, part.detach().cpu()) for item in items for box, part in item.boxes]
    described = [(item.name.partition("/")[2], item.shape, box.slices) for item, box, _ in held]
    local = (described, _packed([part for _, _, part in held]))
    whole: dict[str, Tensor] = {}
    spread: Spread = {}
    filled: set[tuple[str, str]] = set()
    by_rank = (zip(theirs, _unpacked(packed), strict=True) for theirs, packed in gather_objects(local, mesh.world))
    for (name, shape, where), part in chain.from_iterable(by_rank):
        target = whole.setdefault(name, torch.zeros(shape, dtype=part.dtype))
        key = (name, str(where))
        if key in filled and not torch.equal(target[where], part):
            distance = float((target[where].double() - part.double()).abs().max())
            spread[name] = max(spread.get(name, 0.0), distance)
        elif key not in filled:
            filled.add(key)
            target[where] = part
    return whole, spread


@dataclass(frozen=True)
class _Packed:
    """Tensors concatenated by dtype, since a few large tensors are sent faster than many small ones."""

    formats: list[tuple[torch.dtype, torch.Size]]
    flat: dict[torch.dtype, Tensor]


def _packed(parts: Sequence[Tensor]) -> _Packed:
    formats = [(part.dtype, part.shape) for part in parts]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part.reshape(-1))
    return _Packed(formats, {dtype: torch.cat(flat) for dtype, flat in by_dtype.items()})


def _unpacked(packed: _Packed) -> Iterator[Tensor]:
    offsets = dict.fromkeys(packed.flat, 0)
    for dtype, shape in packed.formats:
        start = offsets[dtype]
        offsets[dtype] += shape.numel()
        yield packed.flat[dtype][start : offsets[dtype]].view(shape)
