"""Whole tensors from the parts that ranks hold, on the first rank, and whether parts that are held twice agree.

Ranks that hold the same part of a parameter (along dp always, along tp where it is whole or has copies, both ends of a
tied pair) must hold the same bits of it, or they drift apart.
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
"""By name, the largest difference between two ranks' copies of an element; names without any are absent."""


def gather_whole(items: Sequence[StateItem], mesh: Mesh) -> tuple[dict[str, Tensor], Spread]:
    """The global tensor behind each item by its name without the prefix, and how far copies differ.

    All ranks of the mesh call; the first one gets the result, the others nothing.
    """
    held = [(item, box, part.detach().cpu()) for item in items for box, part in item.boxes]
    places = [(item.name.partition("/")[2], item.shape, box.slices) for item, box, _ in held]
    own = (places, _packed([part for _, _, part in held]))
    whole: dict[str, Tensor] = {}
    spread: Spread = {}
    seen: set[tuple[str, str]] = set()
    by_rank = (zip(theirs, _unpacked(packed), strict=True) for theirs, packed in gather_objects(own, mesh.world))
    for (name, shape, where), part in chain.from_iterable(by_rank):
        target = whole.setdefault(name, torch.zeros(shape, dtype=part.dtype))
        key = (name, str(where))
        if key in seen and not torch.equal(target[where], part):
            distance = float((target[where].double() - part.double()).abs().max())
            spread[name] = max(spread.get(name, 0.0), distance)
        elif key not in seen:
            seen.add(key)
            target[where] = part
    return whole, spread


@dataclass(frozen=True)
class _Packed:
    """Tensors as one of each dtype, which travels faster than many small ones."""

    kinds: list[tuple[torch.dtype, torch.Size]]
    flat: dict[torch.dtype, Tensor]


def _packed(parts: Sequence[Tensor]) -> _Packed:
    kinds = [(part.dtype, part.shape) for part in parts]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        by_dtype.setdefault(part.dtype, []).append(part.reshape(-1))
    return _Packed(kinds, {dtype: torch.cat(same) for dtype, same in by_dtype.items()})


def _unpacked(packed: _Packed) -> Iterator[Tensor]:
    offsets = dict.fromkeys(packed.flat, 0)
    for dtype, shape in packed.kinds:
        start = offsets[dtype]
        offsets[dtype] += shape.numel()
        yield packed.flat[dtype][start : offsets[dtype]].view(shape)
