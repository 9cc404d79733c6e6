"""Arithmetic on index boxes that a checkpoint needs: what two boxes share, and whether boxes cover a tensor exactly.

Nothing here touches a tensor. A save proves with :func:`cover_error` that what the ranks write is each global tensor
once, a load that what it is about to read is; :func:`overlap` is the whole of resharding.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from math import prod

from megastack.errors import counted
from megastack.placement.boxes import Box


def overlap(first: Box, second: Box) -> Box | None:
    """The box that both share, in global indices; ``None`` where they share no element."""
    start = tuple(max(a, b) for a, b in zip(first.offset, second.offset, strict=True))
    stops = zip(first.offset, first.size, second.offset, second.size, strict=True)
    size = tuple(min(a + m, b + n) - s for (a, m, b, n), s in zip(stops, start, strict=True))
    return Box(start, size) if all(extent > 0 for extent in size) else None


def within(inner: Box, outer: Box) -> Box:
    """``inner`` counted from the first element of ``outer`` instead of from the tensor's."""
    return Box(tuple(a - b for a, b in zip(inner.offset, outer.offset, strict=True)), inner.size)


def whole(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def cover_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why the boxes are not the whole tensor with each element exactly once; ``None`` when they are."""
    for box in boxes:
        if not _inside(shape, box):
            return f"box {describe(box)} does not lie within shape {tuple(shape)}"
    if clash := _first_clash(boxes):
        return f"boxes {describe(clash[0])} and {describe(clash[1])} overlap"
    held, wanted = sum(prod(box.size) for box in boxes), prod(shape)
    return None if held == wanted else f"boxes hold {held} of the {counted(wanted, 'element')} of shape {tuple(shape)}"


def describe(box: Box) -> str:
    """The box as Python slices, ``[0:2, 64:128]``."""
    spans = (f"{start}:{start + size}" for start, size in zip(box.offset, box.size, strict=True))
    return f"[{', '.join(spans)}]"


def _inside(shape: Sequence[int], box: Box) -> bool:
    if not len(box.offset) == len(box.size) == len(shape):
        return False
    spans = zip(box.offset, box.size, shape, strict=True)
    return all(start >= 0 and size >= 0 and start + size <= extent for start, size, extent in spans)


def _first_clash(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, by a sweep along the dim that separates the boxes best."""
    filled = [box for box in boxes if prod(box.size)]
    if len(filled) < 2:
        return None
    if not filled[0].size:
        return filled[0], filled[1]
    dim = max(range(len(filled[0].size)), key=lambda d: len({box.offset[d] for box in filled}))
    active: list[tuple[int, int]] = []  # (end, index) of the boxes that the sweep is in
    for index, box in sorted(enumerate(filled), key=lambda pair: pair[1].offset[dim]):
        del active[: bisect_right(active, (box.offset[dim], len(filled)))]
        for _, other in active:
            if overlap(box, filled[other]):
                return filled[other], box
        insort(active, (box.offset[dim] + box.size[dim], index))
    return None
