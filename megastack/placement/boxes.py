"""Index boxes: which part of a parameter a rank holds, as plain integers.

A :class:`Box` is a rectangular part of a tensor, given by its first index and its size in each dim. A tensor-parallel
shard is a box, and a flat range of a row-major tensor (a shard of a flat optimizer state) is a few boxes, so the
checkpoint needs no other representation of a part. Nothing here touches a tensor or a process group.

A dim is sharded into equal contiguous parts. A padded parameter is sharded by its padded size and the box is the
logical part of the shard, which may be smaller or empty on the last ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
