"""Box arithmetic against plain sets of indices."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.checkpoint.cover import cover_error, overlap, whole, within
from megastack.placement.boxes import Box, range_boxes


@st.composite
def boxes(draw: st.DrawFn, dims: int) -> Box:
    offset = draw(st.tuples(*[st.integers(0, 4)] * dims))
    return Box(offset, draw(st.tuples(*[st.integers(0, 4)] * dims)))


@st.composite
def box_pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(0, 3))
    return draw(boxes(dims)), draw(boxes(dims))


@st.composite
def covers(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that are it: a flat cut, each part of which is a few boxes."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3).map(tuple))
    total = len(elements(whole(shape)))
    cuts = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=3))})
    return shape, [box for start, stop in itertools.pairwise(cuts) for box in range_boxes(shape, start, stop)]


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(s, s + n) for s, n in zip(box.offset, box.size, strict=True))))


@settings(deadline=None)
@given(box_pairs())
def test_overlap_is_the_intersection(pair: tuple[Box, Box]) -> None:
    first, second = pair
    common = overlap(first, second)
    assert (elements(common) if common else set()) == elements(first) & elements(second)
    assert common == overlap(second, first)
    if common:
        assert all(start >= 0 for start in within(common, first).offset)
        assert len(elements(within(common, first))) == len(elements(common))


@settings(deadline=None)
@given(covers())
def test_a_cut_of_a_tensor_covers_it(cover: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, parts = cover
    assert cover_error(shape, parts) is None
    assert cover_error(shape, parts[::-1]) is None


@settings(deadline=None)
@given(covers(), st.data())
def test_a_lost_or_doubled_or_moved_box_is_noticed(
    cover: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, parts = cover
    index = data.draw(st.integers(0, len(parts) - 1))
    rest = parts[:index] + parts[index + 1 :]
    assert "element" in (cover_error(shape, rest) or "")
    assert "overlap" in (cover_error(shape, [*parts, parts[index]]) or "")
    if shape:
        moved = Box((parts[index].offset[0] + 1, *parts[index].offset[1:]), parts[index].size)
        assert cover_error(shape, [*rest, moved])


def test_a_gap_that_an_overlap_makes_up_for_is_noticed() -> None:
    assert "overlap" in (cover_error((4, 2), [Box((0, 0), (2, 2)), Box((1, 0), (2, 2))]) or "")


def test_a_box_outside_of_the_tensor_is_noticed() -> None:
    assert "within" in (cover_error((4,), [Box((2,), (3,))]) or "")
    assert "within" in (cover_error((4,), [Box((0, 0), (4, 1))]) or "")


def test_a_tensor_without_elements_is_covered_by_nothing() -> None:
    assert cover_error((0, 3), []) is None
    assert cover_error((3,), [])
