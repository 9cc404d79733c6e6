"""Index boxes: the part of a parameter that a rank holds, as plain integers.

A :class:`Box` is a rectangular part of a tensor, given by its first index and its size in each dim. A tensor-parallel
shard is a box, and a flat range of a row-major tensor (a shard of a flat optimizer state) is a few boxes, so the
checkpoint needs no other representation of a part. Nothing here touches a tensor or a process group.

A dim is sharded into equal contiguous parts. A padded parameter is sharded by its padded size and the box is the
logical part of the shard, which may be smaller or empty on the last ranks.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megastack.errors import PlacementError, counted
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.placement import Placement, Shard

_LEGAL_DEGREES_SHOWN = 12


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: the index of its first element and its size, in each dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the box from the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.size, strict=True))


def local_shape(placement: Placement, mesh_shape: MeshShape) -> tuple[int, ...]:
    """The shape that every rank allocates for the parameter, padding included.

    Raises:
        PlacementError: a sharded dim is not divisible; the message lists the degrees that would work.
    """
    if errors := divisibility_errors(placement, mesh_shape):
        raise PlacementError("; ".join(errors))
    sizes = list(placement.allocated_shape)
    for axis, shard in placement.shards.items():
        sizes[shard.dim] //= _parts(shard, mesh_shape.size(axis))
    return tuple(sizes)


def local_box(placement: Placement, mesh_shape: MeshShape, coordinates: Mapping[Axis, int]) -> Box:
    """The logical elements that the rank at ``coordinates`` holds, as a box of the global shape.

    The box is the leading corner of the local tensor; the rest of it is padding.
    """
    sizes = local_shape(placement, mesh_shape)
    offset = [0] * len(sizes)
    for axis, shard in placement.shards.items():
        offset[shard.dim] = coordinates[axis] // shard.copies * sizes[shard.dim]
    start = tuple(min(first, whole) for first, whole in zip(offset, placement.shape, strict=True))
    stop = tuple(min(a + b, whole) for a, b, whole in zip(offset, sizes, placement.shape, strict=True))
    return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))


def divisibility_errors(placement: Placement, mesh_shape: MeshShape) -> list[str]:
    """One message for each axis whose degree does not divide the dim that it shards."""
    errors = []
    for axis, shard in placement.shards.items():
        degree, size = mesh_shape.size(axis), placement.allocated_shape[shard.dim]
        if degree % shard.copies or size % _parts(shard, degree):
            errors.append(
                f"{axis}={degree}: must split dim {shard.dim} of {placement.allocated_shape} into equal parts"
                f"{f' with {shard.copies} copies of each' if shard.copies > 1 else ''}; "
                f"use {axis} of {_legal_degrees(size, shard.copies)}"
            )
    return errors


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> tuple[Box, ...]:
    """The flat range ``[start, stop)`` of a row-major tensor as boxes, in flat order, each contiguous in memory.

    At most ``2n - 1`` boxes for ``n`` dims: the tail of the first row, the full rows between, the head of the last row;
    the two partial rows are split in the same way over the dims below.

    Raises:
        PlacementError: the range is not within the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise PlacementError(
            f"range [{start}, {stop}): must lie within the {counted(prod(shape), 'element')} of shape {shape}"
        )
    return tuple(Box(offset, size) for offset, size in _range_parts(tuple(shape), start, stop))


def whole_box(shape: Sequence[int]) -> Box:
    """The box that spans the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(first: Box, second: Box) -> Box | None:
    """The intersection of two boxes of one tensor, in global indices; ``None`` if it is empty."""
    start = tuple(max(a, b) for a, b in zip(first.offset, second.offset, strict=True))
    stops = zip(first.offset, first.size, second.offset, second.size, strict=True)
    size = tuple(min(a + m, b + n) - s for (a, m, b, n), s in zip(stops, start, strict=True))
    return Box(start, size) if all(extent > 0 for extent in size) else None


def relative_to(inner: Box, outer: Box) -> Box:
    """``inner`` with its offset counted from the first element of ``outer``."""
    return Box(tuple(a - b for a, b in zip(inner.offset, outer.offset, strict=True)), inner.size)


def describe_box(box: Box) -> str:
    """The box as Python slices, ``[0:2, 64:128]``."""
    spans = (f"{start}:{start + size}" for start, size in zip(box.offset, box.size, strict=True))
    return f"[{', '.join(spans)}]"


def coverage_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Check that the boxes cover the tensor exactly once. Returns the error, or ``None``."""
    for box in boxes:
        if not _is_inside(shape, box):
            return f"box {describe_box(box)} does not lie within shape {tuple(shape)}"
    if pair := _first_overlap(boxes):
        return f"boxes {describe_box(pair[0])} and {describe_box(pair[1])} overlap"
    covered, expected = sum(prod(box.size) for box in boxes), prod(shape)
    if covered == expected:
        return None
    return f"boxes hold {covered} of the {counted(expected, 'element')} of shape {tuple(shape)}"


def _is_inside(shape: Sequence[int], box: Box) -> bool:
    if not len(box.offset) == len(box.size) == len(shape):
        return False
    spans = zip(box.offset, box.size, shape, strict=True)
    return all(start >= 0 and size >= 0 and start + size <= extent for start, size, extent in spans)


def _first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, found by a sweep along the dim with the most distinct offsets."""
    filled = [box for box in boxes if prod(box.size)]
    if len(filled) < 2:
        return None
    if not filled[0].size:
        return filled[0], filled[1]
    dim = max(range(len(filled[0].size)), key=lambda d: len({box.offset[d] for box in filled}))
    active: list[tuple[int, int]] = []  # (end, index) of the boxes that the sweep line crosses
    for index, box in sorted(enumerate(filled), key=lambda pair: pair[1].offset[dim]):
        del active[: bisect_right(active, (box.offset[dim], len(filled)))]
        for _, other in active:
            if intersect(box, filled[other]):
                return filled[other], box
        insort(active, (box.offset[dim] + box.size[dim], index))
    return None


def _range_parts(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and size of each box of a range; recursive over dims."""
    if start == stop:
        return
    if not shape:
        yield (), ()
        return
    row, below = prod(shape[1:]), shape[1:]
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head:
        end = tail if first == last else row
        yield from (((first, *offset), (1, *size)) for offset, size in _range_parts(below, head, end))
        first += 1
    if first < last:
        yield (first, *(0,) * len(below)), (last - first, *below)
    if tail and first <= last:
        yield from (((last, *offset), (1, *size)) for offset, size in _range_parts(below, 0, tail))


def _parts(shard: Shard, degree: int) -> int:
    """The number of different parts that the ranks of the axis hold."""
    return max(1, degree // shard.copies)


def _legal_degrees(size: int, copies: int) -> str:
    legal = [str(parts * copies) for parts in range(1, size + 1) if size % parts == 0]
    shown = legal[:_LEGAL_DEGREES_SHOWN]
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]])) if shown else "1"
