"""The grid of ranks as arithmetic: ranks and coordinates, groups, the expert view, the printed table, errors."""

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastack.errors import MegastackError, MeshError
from megastack.mesh.shape import DENSE_AXES, Axis, MeshShape, describe_coordinates

DEGREES = st.integers(1, 4)
SHAPES = st.builds(MeshShape, pp=DEGREES, dp=DEGREES, cp=DEGREES, tp=DEGREES)


def with_experts(shape: MeshShape) -> list[MeshShape]:
    fused = shape.dp * shape.cp
    return [MeshShape(shape.pp, shape.dp, shape.cp, shape.tp, ep) for ep in range(1, fused + 1) if fused % ep == 0]


@given(SHAPES)
def test_rank_and_coordinates_are_inverse_and_cover_the_grid(shape: MeshShape) -> None:
    seen = set()
    for rank in range(shape.world_size):
        at = shape.coordinates(rank)
        dense = {axis.value: at[axis] for axis in DENSE_AXES}
        assert list(at) == list(Axis)
        assert shape.rank_at(**dense) == rank
        seen.add(tuple(dense.values()))
    assert seen == set(itertools.product(*(range(shape.size(axis)) for axis in DENSE_AXES)))


def test_tp_is_innermost_and_pp_outermost() -> None:
    shape = MeshShape(pp=2, dp=3, cp=2, tp=4)
    assert [shape.rank_at(**{axis: 1}) for axis in ("tp", "cp", "dp", "pp")] == [1, 4, 8, 24]
    assert shape.rank_at() == 0
    assert shape.rank_at(pp=1, dp=2, cp=1, tp=3) == shape.world_size - 1


@given(SHAPES, st.sets(st.sampled_from(DENSE_AXES)))
def test_groups_partition_the_ranks_and_differ_only_along_their_axes(shape: MeshShape, axes: set[Axis]) -> None:
    groups = shape.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(shape.world_size))
    for group in groups:
        assert group == sorted(group)
        others = {tuple(shape.coordinates(rank)[axis] for axis in DENSE_AXES if axis not in axes) for rank in group}
        along = {tuple(shape.coordinates(rank)[axis] for axis in DENSE_AXES if axis in axes) for rank in group}
        assert len(others) == 1
        assert len(along) == len(group)


def test_groups_of_a_known_grid() -> None:
    shape = MeshShape(pp=2, dp=2, tp=2)
    assert shape.groups(Axis.TP) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shape.groups(Axis.DP) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert shape.groups(Axis.PP) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.groups(Axis.PP, Axis.TP) == shape.groups(Axis.TP, Axis.PP) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert shape.groups() == [[rank] for rank in range(8)]


@given(SHAPES)
def test_expert_groups_are_adjacent_cuts_of_a_stages_data_ranks(shape: MeshShape) -> None:
    for seen in with_experts(shape):
        groups = seen.groups(Axis.EP)
        assert sorted(rank for group in groups for rank in group) == list(range(seen.world_size))
        fused = seen.groups(Axis.DP, Axis.CP)
        for group in groups:
            assert len(group) == seen.ep
            (home,) = [ranks for ranks in fused if group[0] in ranks]
            start = home.index(group[0])
            assert home[start : start + seen.ep] == group, "ep is adjacent, and pp and tp are kept"
            assert [seen.coordinates(rank)[Axis.EP] for rank in group] == list(range(seen.ep))
        assert seen.groups(Axis.PP) == shape.groups(Axis.PP), "the same in both views"


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tp": 0}, "tp=0: must be a positive integer"),
        ({"dp": -2}, "dp=-2"),
        ({"pp": 2.0}, "pp=2.0"),
        ({"cp": True}, "cp=True"),
        ({"dp": 2, "cp": 3, "ep": 4}, "ep=4: must divide dp * cp = 6"),
    ],
)
def test_illegal_degrees_are_refused_with_their_numbers(degrees: dict[str, int], words: str) -> None:
    with pytest.raises(MeshError, match=re.escape(words)) as caught:
        MeshShape(**degrees)
    assert isinstance(caught.value, MegastackError)


def test_places_off_the_grid_are_refused() -> None:
    shape = MeshShape(dp=2, tp=2)
    for rank in (-1, 4):
        with pytest.raises(MeshError, match=f"rank={rank}: must be one of 0 … 3 of dp2·tp2"):
            shape.coordinates(rank)
    with pytest.raises(MeshError, match="tp=2: must be one of 0 … 1"):
        shape.rank_at(tp=2)
    with pytest.raises(MeshError, match="dp=-1"):
        shape.rank_at(dp=-1)
    with pytest.raises(MeshError, match="ep, xp: no such coordinate; use pp, dp, cp or tp"):
        shape.rank_at(xp=0, ep=0)
    with pytest.raises(MeshError, match="ep: expert groups cannot be fused"):
        shape.groups(Axis.EP, Axis.TP)


def test_shapes_are_values() -> None:
    assert MeshShape(tp=2) == MeshShape(1, 1, 1, 2) != MeshShape(dp=2)
    assert len({MeshShape(tp=2), MeshShape(tp=2)}) == 1
    assert (str(MeshShape()), str(MeshShape(pp=2, dp=3, tp=4))) == ("one rank", "pp2·dp3·tp4")
    with pytest.raises(AttributeError):
        MeshShape().tp = 2  # type: ignore[misc]


def test_the_table_of_one_rank() -> None:
    assert MeshShape().table() == "rank    pp    dp    tp\n   0     0     0     0"


def test_the_table_lists_every_axis_in_use() -> None:
    lines = MeshShape(dp=2, cp=2, ep=2).table().splitlines()
    assert lines[0].split() == ["rank", "pp", "dp", "cp", "tp", "ep"]
    assert [line.split() for line in lines[1:]] == [
        ["0", "0", "0", "0", "0", "0"],
        ["1", "0", "0", "1", "0", "1"],
        ["2", "0", "1", "0", "0", "0"],
        ["3", "0", "1", "1", "0", "1"],
    ]


def test_the_table_of_16384_ranks_is_short_and_quick() -> None:
    shape = MeshShape(pp=16, dp=128, tp=8)
    start = time.process_time()
    lines = shape.table().splitlines()
    assert time.process_time() - start < 1
    assert shape.world_size == 16_384
    assert len(lines) == 1 + 16 + 1
    assert lines[-1].split() == ["16383", "15", "127", "7"]
    assert lines[9].strip() == "⋮"
    assert len({len(line) for line in lines if "⋮" not in line}) == 1, "columns stand under each other"


def test_coordinates_as_words() -> None:
    assert describe_coordinates(MeshShape(pp=2, dp=2, tp=2).coordinates(5)) == "pp1 dp0 tp1"
    assert describe_coordinates(MeshShape(cp=2).coordinates(1)) == "pp0 dp0 cp1 tp0"
