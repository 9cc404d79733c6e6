"""Boxes: which elements a rank holds, and flat ranges as boxes, checked element by element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.errors import PlacementError
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import (
    Box,
    coverage_error,
    intersect,
    local_box,
    local_shape,
    range_boxes,
    relative_to,
    whole_box,
)
from megastack.placement.placement import Placement, Shard

shapes_with_range = st.lists(st.integers(1, 5), max_size=5).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=2).map(sorted),
    )
)


@given(shapes_with_range)
def test_a_flat_range_is_covered_once_in_flat_order_by_few_boxes(case: tuple[tuple[int, ...], list[int]]) -> None:
    shape, (start, stop) = case
    index = np.arange(math.prod(shape)).reshape(shape)
    boxes = range_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(box.numel > 0 for box in boxes)
    covered = [index[box.slices].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([*covered, index.ravel()[:0]]), np.arange(start, stop))


def test_a_range_of_a_matrix_is_a_tail_full_rows_and_a_head() -> None:
    assert range_boxes((5, 4), 3, 14) == (Box((0, 3), (1, 1)), Box((1, 0), (2, 4)), Box((3, 0), (1, 2)))
    assert range_boxes((5, 4), 5, 7) == (Box((1, 1), (1, 2)),)
    assert range_boxes((2, 3, 4), 1, 23) == (
        Box((0, 0, 1), (1, 1, 3)),
        Box((0, 1, 0), (1, 2, 4)),
        Box((1, 0, 0), (1, 2, 4)),
        Box((1, 2, 0), (1, 1, 3)),
    )
    assert len(range_boxes((3, 3, 4), 1, 35)) == 5


def test_a_whole_tensor_is_one_box_and_nothing_is_none() -> None:
    assert range_boxes((2, 3, 4), 0, 24) == (Box((0, 0, 0), (2, 3, 4)),)
    assert range_boxes((2, 3), 3, 3) == () == range_boxes((0, 3), 0, 0)
    assert range_boxes((), 0, 1) == (Box((), ()),)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(PlacementError, match=r"must lie within the 6 elements of shape \(2, 3\)"):
        range_boxes((2, 3), start, stop)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Placement, MeshShape]:
    """A parameter cut over tp with copies and padding, and a mesh that it fits."""
    copies, parts = draw(st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 2), (4, 1)]))
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    padded = list(shape)
    padded[dim] = -(-(shape[dim] + draw(st.integers(0, 9))) // parts) * parts
    placement = Placement(tuple(shape), {Axis.TP: Shard(dim, copies)}, padded_shape=tuple(padded))
    return placement, MeshShape(tp=copies * parts, dp=2)


@given(sharded())
def test_ranks_hold_every_element_as_often_as_there_are_copies(case: tuple[Placement, MeshShape]) -> None:
    placement, mesh_shape = case
    held = np.zeros(placement.shape, int)
    for coordinate in range(mesh_shape.tp):
        at = {Axis.TP: coordinate}
        box = local_box(placement, mesh_shape, at)
        assert all(a <= b for a, b in zip(box.size, local_shape(placement, mesh_shape), strict=True))
        held[box.slices] += 1
    assert (held == placement.shards[Axis.TP].copies).all()


@given(sharded())
def test_the_ranks_allocate_the_padded_shape_together(case: tuple[Placement, MeshShape]) -> None:
    placement, mesh_shape = case
    parts = mesh_shape.tp // placement.shards[Axis.TP].copies
    assert math.prod(local_shape(placement, mesh_shape)) * parts == math.prod(placement.allocated_shape)


def test_copies_sit_on_adjacent_ranks() -> None:
    kv = Placement((2, 2, 8, 16), {Axis.TP: Shard(0, copies=2)})
    mesh_shape = MeshShape(tp=4)
    boxes = [local_box(kv, mesh_shape, {Axis.TP: t}) for t in range(4)]
    assert [box.offset[0] for box in boxes] == [0, 0, 1, 1]
    assert local_shape(kv, mesh_shape) == (1, 2, 8, 16)


def test_padding_stays_outside_of_the_boxes() -> None:
    rows = Placement((5, 3), {Axis.TP: Shard(0)}, padded_shape=(8, 3))
    boxes = [local_box(rows, MeshShape(tp=4), {Axis.TP: t}) for t in range(4)]
    assert [(box.offset, box.size) for box in boxes] == [
        ((0, 0), (2, 3)),
        ((2, 0), (2, 3)),
        ((4, 0), (1, 3)),
        ((5, 0), (0, 3)),
    ]
    assert local_shape(rows, MeshShape(tp=4)) == (2, 3)


def test_a_replicated_parameter_is_whole_on_every_rank() -> None:
    assert local_box(Placement((4,)), MeshShape(tp=2), {Axis.TP: 1}) == Box((0,), (4,))


def test_two_axes_cut_two_dims() -> None:
    experts = Placement((4, 6, 8), {Axis.EP: Shard(0), Axis.TP: Shard(1)})
    mesh_shape = MeshShape(dp=2, tp=3, ep=2)
    assert local_shape(experts, mesh_shape) == (2, 2, 8)
    assert local_box(experts, mesh_shape, {Axis.EP: 1, Axis.TP: 2}) == Box((2, 4, 0), (2, 2, 8))


@pytest.mark.parametrize(
    ("shard", "tp", "message"),
    [
        (Shard(0), 4, r"tp=4: must cut dim 0 of \(6, 8\) into equal parts; use tp of 1, 2, 3 or 6"),
        (Shard(1), 3, r"tp=3: must cut dim 1 of \(6, 8\) into equal parts; use tp of 1, 2, 4 or 8"),
        (Shard(0, copies=2), 8, r"tp=8: .* with 2 copies of each; use tp of 2, 4, 6 or 12"),
        (Shard(0, copies=2), 3, r"tp=3: .* with 2 copies of each; use tp of 2, 4, 6 or 12"),
    ],
)
def test_a_dim_that_is_not_divisible_is_refused_with_the_legal_degrees(shard: Shard, tp: int, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        local_shape(Placement((6, 8), {Axis.TP: shard}), MeshShape(tp=tp))


def test_a_box_knows_its_elements() -> None:
    box = Box((1, 2), (2, 3))
    assert box.numel == 6 and Box((), ()).numel == 1
    assert np.arange(30).reshape(5, 6)[box.slices].tolist() == [[8, 9, 10], [14, 15, 16]]


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> Box:
    offset = draw(st.tuples(*[st.integers(0, 4)] * dims))
    return Box(offset, draw(st.tuples(*[st.integers(0, 4)] * dims)))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(0, 3))
    return draw(boxes(dims)), draw(boxes(dims))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that cover it: a flat partition, each part of which is a few boxes."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    total = len(elements(whole_box(shape)))
    cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=3))})
    return shape, [box for start, stop in itertools.pairwise(cuts) for box in range_boxes(shape, start, stop)]


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(s, s + n) for s, n in zip(box.offset, box.size, strict=True))))


@settings(deadline=None)
@given(box_pairs())
def test_intersection_of_two_boxes(pair: tuple[Box, Box]) -> None:
    first, second = pair
    common = intersect(first, second)
    assert (elements(common) if common else set()) == elements(first) & elements(second)
    assert common == intersect(second, first)
    if common:
        assert all(start >= 0 for start in relative_to(common, first).offset)
        assert len(elements(relative_to(common, first))) == len(elements(common))


@settings(deadline=None)
@given(partitions())
def test_a_partition_of_a_tensor_covers_it(partition: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, parts = partition
    assert coverage_error(shape, parts) is None
    assert coverage_error(shape, parts[::-1]) is None


@settings(deadline=None)
@given(partitions(), st.data())
def test_a_missing_duplicate_or_moved_box_is_an_error(
    partition: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, parts = partition
    index = data.draw(st.integers(0, len(parts) - 1))
    rest = parts[:index] + parts[index + 1 :]
    assert "element" in (coverage_error(shape, rest) or "")
    assert "overlap" in (coverage_error(shape, [*parts, parts[index]]) or "")
    if shape:
        moved = Box((parts[index].offset[0] + 1, *parts[index].offset[1:]), parts[index].size)
        assert coverage_error(shape, [*rest, moved])


def test_a_gap_that_an_overlap_compensates_is_an_error() -> None:
    assert "overlap" in (coverage_error((4, 2), [Box((0, 0), (2, 2)), Box((1, 0), (2, 2))]) or "")


def test_a_box_outside_the_tensor_is_an_error() -> None:
    assert "within" in (coverage_error((4,), [Box((2,), (3,))]) or "")
    assert "within" in (coverage_error((4,), [Box((0, 0), (4, 1))]) or "")


def test_a_tensor_without_elements_needs_no_box() -> None:
    assert coverage_error((0, 3), []) is None
    assert coverage_error((3,), [])
