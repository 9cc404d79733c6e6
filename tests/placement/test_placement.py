"""A placement is a checked, comparable value that needs no torch."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from megastack.errors import PlacementError
from megastack.mesh.shape import Axis
from megastack.placement.placement import Normal, Ones, Placement, Shard, Zeros


def test_defaults_are_a_replicated_decayed_normal_parameter() -> None:
    placement = Placement((3, 4))
    assert placement.shards == {} and placement.partial == frozenset()
    assert placement.init == Normal(0.02) and placement.decay
    assert placement.allocated_shape == (3, 4) and placement.numel == 12


def test_padding_changes_the_allocated_shape_and_not_the_count() -> None:
    placement = Placement((5, 4), padded_shape=(8, 4))
    assert placement.allocated_shape == (8, 4) and placement.numel == 20


def test_equal_placements_are_equal_hash_equal_and_survive_pickling() -> None:
    one, same = (Placement((4, 2), {Axis.TP: Shard(0, copies=2)}, init=Ones()) for _ in range(2))
    assert one == same and hash(one) == hash(same) and pickle.loads(pickle.dumps(one)) == one
    assert one != Placement((4, 2), {Axis.TP: Shard(1, copies=2)}, init=Ones())
    assert one != Placement((4, 2), {Axis.TP: Shard(0, copies=2)}, init=Zeros())


def test_later_changes_of_the_arguments_do_not_reach_it() -> None:
    shape, shards = [4, 2], {Axis.TP: Shard(0)}
    placement = Placement(shape, shards)  # type: ignore[arg-type]
    shape[0], shards[Axis.TP] = 9, Shard(1)
    assert placement == Placement((4, 2), {Axis.TP: Shard(0)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (4, -2)}, r"shape=\(4, -2\): sizes must not be negative"),
        ({"shape": (4, 2), "padded_shape": (3, 2)}, r"padded_shape=\(3, 2\): .* none of them smaller"),
        ({"shape": (4, 2), "padded_shape": (4, 2, 1)}, r"padded_shape=\(4, 2, 1\): must have the dims"),
        ({"shape": (4, 2), "shards": {Axis.DP: Shard(0)}}, r"shards axis dp: only tp, ep shard a parameter"),
        ({"shape": (4, 2), "shards": {Axis.TP: Shard(2)}}, r"shards\[tp\].*has 2 dims; use dim 0 to 1"),
        ({"shape": (), "shards": {Axis.TP: Shard(0)}}, r"has 0 dims; do not shard it"),
        ({"shape": (4, 2), "shards": {Axis.TP: Shard(0), Axis.EP: Shard(0)}}, r"two axes shard the same dim"),
        (
            {"shape": (4, 2), "partial": frozenset({Axis.CP})},
            r"partial axis cp: every gradient is summed over dp and cp",
        ),
        (
            {"shape": (4, 2), "shards": {Axis.TP: Shard(0)}, "partial": frozenset({Axis.TP})},
            r"partial axis tp: the axis also shards",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_errors(arguments: dict, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement(**arguments)


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(PlacementError) as error:
        Placement((4, 2), {Axis.TP: Shard(5)}, frozenset({Axis.DP}))
    assert "shards[tp]" in str(error.value) and "partial axis dp" in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard(-1), "Shard dim=-1"),
        (lambda: Shard(0, copies=0), "Shard copies=0"),
        (lambda: Normal(-0.5), "Normal std=-0.5"),
        (lambda: Normal(float("nan")), "Normal std=nan"),
    ],
)
def test_invalid_parts_are_errors(make, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        make()


def test_placements_and_boxes_import_no_torch() -> None:
    code = "import sys, megastack.placement.boxes, megastack.placement.placement; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
