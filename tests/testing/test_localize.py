"""Fault localization: agreement over all ranks, a module's own faults and propagated ones, the enclosing user class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from megastack.layers.norm import RMSNorm
from megastack.mesh.mesh import Mesh
from megastack.testing.localize import (
    Agreement,
    FaultyModule,
    ModuleClasses,
    agreements,
    enclosing,
    is_packaged,
    localize_backward,
    localize_forward,
    merge_agreements,
)
from megastack.testing.module_trace import ModuleCall, TPRank

X = torch.randn(2, 8, 4, dtype=torch.float64)
WRONG = X + 1.0
RIGHT, OFF, PROPAGATED, UNKNOWN = (
    Agreement(True, True),
    Agreement(True, False),
    Agreement(False, False),
    Agreement(None, False),
)


def forward(found: dict[str, Agreement], user: str = "") -> FaultyModule | None:
    return localize_forward(found, ModuleClasses(dict.fromkeys(found, "C"), frozenset(user.split())))


def test_the_first_module_whose_input_is_right_is_at_fault_and_not_those_after_it() -> None:
    found = {"a.up": RIGHT, "a.down": PROPAGATED, "a": OFF, "b": PROPAGATED}
    assert forward(found) == FaultyModule("a", "forward", True, "a", "a.down")
    assert forward(found | {"a.down": OFF}) == FaultyModule("a.down", "forward", True, "a.down")


def test_a_partial_sum_that_the_enclosing_module_reduces_is_not_a_fault() -> None:
    assert forward({"a.partial": OFF, "a": RIGHT, "b": OFF}) == FaultyModule("b", "forward", True, "b")
    assert forward({"a.partial": OFF, "a": RIGHT, "b": RIGHT}) is None


def test_the_innermost_enclosing_class_of_the_users_is_named() -> None:
    found = {"a.b.down": OFF, "a.b": OFF, "a": OFF}
    assert forward(found, "a a.b") == FaultyModule("a.b", "forward", True, "a.b.down")
    assert forward(found, "a") == FaultyModule("a", "forward", True, "a.b.down")
    assert forward(found, "a.b.down a") == FaultyModule("a.b.down", "forward", True, "a.b.down")
    assert forward(found | {"a.b": Agreement(False, False)}, "a a.b") == FaultyModule("a", "forward", True, "a.b.down")
    assert forward(found | {"a.b": Agreement(True, None)}, "a.b") == FaultyModule("a.b", "forward", True, "a.b.down")


def test_a_module_with_inputs_that_cannot_be_compared_is_named_last_and_is_not_proven() -> None:
    assert forward({"a": UNKNOWN, "b": OFF}) == FaultyModule("b", "forward", True, "b")
    assert forward({"a": UNKNOWN, "b": PROPAGATED}) == FaultyModule("a", "forward", False, "a")


def test_the_first_module_with_a_wrong_input_gradient_is_at_fault_in_the_backward_pass() -> None:
    late, wrong, right = (Agreement(True, True, *flags) for flags in ((False, False), (True, False), (True, True)))
    found = {
        "b0.mlp": late,
        "b0": late,
        "b1.attention": late,
        "b1.mlp.up": right,
        "b1.mlp": wrong,
        "b1": wrong,
    }
    assert localize_backward(found, ModuleClasses({})) == FaultyModule("b1.mlp", "backward", True, "b1.mlp")
    named = localize_backward(found, ModuleClasses({}, frozenset({"b1"})))
    assert named == FaultyModule("b1", "backward", True, "b1.mlp")
    assert localize_backward(dict.fromkeys(found, right), ModuleClasses({})) is None


def test_a_tensor_matches_only_if_it_does_on_every_rank() -> None:
    here, there = {"a": RIGHT, "b": RIGHT}, {"a": Agreement(False, None), "c": OFF}
    assert merge_agreements([here, there], ["a", "b", "c", "d"]) == {"a": Agreement(False, None), "b": RIGHT, "c": OFF}


def test_a_local_index_that_is_right_on_the_first_rank_is_localized_from_the_other_rank() -> None:
    """From the first rank alone, the product that follows would look wrong."""
    one = {"a.down": OFF, "a": OFF}
    other = {"a.down": PROPAGATED, "a": OFF}
    assert forward(merge_agreements([one, other], ["a.down", "a"])) == FaultyModule("a", "forward", True, "a", "a.down")


def compared(expected: ModuleCall, actual: ModuleCall) -> Agreement:
    return agreements({"a": expected}, {"a": actual}, TPRank(0, 2), 1e-10)["a"]


def test_matching_shards_and_rounding_agree() -> None:
    whole = ModuleCall({0: X}, {0: X})
    assert compared(whole, ModuleCall({0: X[:, :4]}, {0: X[:, :4] * (1 + 1e-14)})) == RIGHT
    assert compared(whole, ModuleCall({0: X[:, :4]}, {0: X[:, 4:]})) == OFF
    assert compared(whole, ModuleCall({0: X}, {0: X * torch.nan})) == OFF


def test_an_input_agrees_only_if_all_of_it_can_be_compared() -> None:
    whole = ModuleCall({0: X, 1: X}, {0: X, 1: X})
    assert compared(whole, ModuleCall({0: X, 1: X[:, :3]}, {0: X, 1: X[:, :3]})) == Agreement(None, True)
    assert compared(whole, ModuleCall({0: WRONG, 1: X[:, :3]}, {0: X})) == Agreement(False, True)
    assert compared(ModuleCall(), ModuleCall()) == Agreement(None, None)


class Mine(nn.Linear):
    pass


class Same(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("wrap", [False, True])
def test_classes_are_those_that_were_written_and_torchs_are_not_the_users(wrap: bool) -> None:
    mine = Mine(4, 4)
    if wrap:
        parametrize.register_parametrization(mine, "weight", Same())
        assert type(mine) is not Mine
    classes = ModuleClasses.of({"": mine, "a": mine, "a.norm": RMSNorm(4, Mesh.single()), "a.norm.x": nn.Dropout()})
    assert dict(classes.by_name) == {"": "Mine", "a": "Mine", "a.norm": "RMSNorm", "a.norm.x": "Dropout"}
    assert classes.user == {"", "a"}
    assert (classes.user_module("a.norm.x"), classes.user_module("b")) == ("a", "")
    assert classes.responsible_class("a.norm") == "Mine"
    assert (classes.label(""), classes.label("a.norm")) == ("the layer (Mine)", "a.norm (RMSNorm)")


def test_classes_of_the_package_and_of_torch_are_distinguished() -> None:
    assert is_packaged(RMSNorm(4, Mesh.single()))
    assert not is_packaged(nn.Dropout())
    assert list(enclosing("a.b")) == ["a.b", "a", ""]
