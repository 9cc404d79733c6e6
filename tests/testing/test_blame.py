"""Which module is at fault: agreement on all ranks, own faults against inherited ones, the user's class around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from megastack.layers.norm import RMSNorm
from megastack.mesh.mesh import Mesh
from megastack.testing.blame import (
    Agreement,
    Blame,
    Classes,
    agreements,
    around,
    blame_backward,
    blame_forward,
    is_packaged,
    merge,
)
from megastack.testing.module_trace import Place, Seen

X = torch.randn(2, 8, 4, dtype=torch.float64)
WRONG = X + 1.0
RIGHT, OFF, LATE, OPEN = (
    Agreement(True, True),
    Agreement(True, False),
    Agreement(False, False),
    Agreement(None, False),
)


def forward(found: dict[str, Agreement], own: str = "") -> Blame | None:
    return blame_forward(found, Classes(dict.fromkeys(found, "C"), frozenset(own.split())))


def test_the_first_module_whose_input_is_right_is_at_fault_and_not_those_after_it() -> None:
    found = {"a.up": RIGHT, "a.down": LATE, "a": OFF, "b": LATE}
    assert forward(found) == Blame("a", "forward", True, "a", "a.down")
    assert forward(found | {"a.down": OFF}) == Blame("a.down", "forward", True, "a.down")


def test_a_part_that_the_module_around_it_puts_right_is_no_error() -> None:
    assert forward({"a.partial": OFF, "a": RIGHT, "b": OFF}) == Blame("b", "forward", True, "b")
    assert forward({"a.partial": OFF, "a": RIGHT, "b": RIGHT}) is None


def test_the_innermost_class_of_the_users_around_a_fault_is_named() -> None:
    found = {"a.b.down": OFF, "a.b": OFF, "a": OFF}
    assert forward(found, "a a.b") == Blame("a.b", "forward", True, "a.b.down")
    assert forward(found, "a") == Blame("a", "forward", True, "a.b.down")
    assert forward(found, "a.b.down a") == Blame("a.b.down", "forward", True, "a.b.down")
    assert forward(found | {"a.b": Agreement(False, False)}, "a a.b") == Blame("a", "forward", True, "a.b.down")
    assert forward(found | {"a.b": Agreement(True, None)}, "a.b") == Blame("a.b", "forward", True, "a.b.down")


def test_what_was_given_something_that_cannot_be_compared_is_named_last_and_not_proven() -> None:
    assert forward({"a": OPEN, "b": OFF}) == Blame("b", "forward", True, "b")
    assert forward({"a": OPEN, "b": LATE}) == Blame("a", "forward", False, "a")


def test_the_innermost_module_around_the_first_break_seen_from_the_loss_is_at_fault_in_the_backward() -> None:
    late, broken, right = (Agreement(True, True, *flags) for flags in ((False, False), (True, False), (True, True)))
    found = {"b0.mlp": late, "b0": late, "b1.attention": late, "b1.mlp.up": right, "b1.mlp": broken, "b1": broken}
    assert blame_backward(found, Classes({})) == Blame("b1.mlp", "backward", True, "b1.mlp")
    named = blame_backward(found, Classes({}, frozenset({"b1"})))
    assert named == Blame("b1", "backward", True, "b1.mlp")
    assert blame_backward(dict.fromkeys(found, right), Classes({})) is None


def test_ranks_agree_only_if_all_of_them_do() -> None:
    here, there = {"a": RIGHT, "b": RIGHT}, {"a": Agreement(False, None), "c": OFF}
    assert merge([here, there], ["a", "b", "c", "d"]) == {"a": Agreement(False, None), "b": RIGHT, "c": OFF}


def test_a_local_index_that_is_right_on_the_first_rank_does_not_accuse_what_comes_after_it() -> None:
    """The first rank alone would say that the product behind it is wrong."""
    one = {"a.down": OFF, "a": OFF}
    other = {"a.down": LATE, "a": OFF}
    assert forward(merge([one, other], ["a.down", "a"])) == Blame("a", "forward", True, "a", "a.down")


def compared(expected: Seen, actual: Seen) -> Agreement:
    return agreements({"a": expected}, {"a": actual}, Place(0, 2), 1e-10)["a"]


def test_right_shares_and_rounding_agree() -> None:
    whole = Seen({0: X}, {0: X})
    assert compared(whole, Seen({0: X[:, :4]}, {0: X[:, :4] * (1 + 1e-14)})) == RIGHT
    assert compared(whole, Seen({0: X[:, :4]}, {0: X[:, 4:]})) == OFF
    assert compared(whole, Seen({0: X}, {0: X * torch.nan})) == OFF


def test_an_input_agrees_only_if_all_of_it_can_be_compared() -> None:
    whole = Seen({0: X, 1: X}, {0: X, 1: X})
    assert compared(whole, Seen({0: X, 1: X[:, :3]}, {0: X, 1: X[:, :3]})) == Agreement(None, True)
    assert compared(whole, Seen({0: WRONG, 1: X[:, :3]}, {0: X})) == Agreement(False, True)
    assert compared(Seen(), Seen()) == Agreement(None, None)


class Mine(nn.Linear):
    pass


class Same(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("wrap", [False, True])
def test_classes_are_as_they_were_written_and_torchs_are_not_the_users(wrap: bool) -> None:
    mine = Mine(4, 4)
    if wrap:
        parametrize.register_parametrization(mine, "weight", Same())
        assert type(mine) is not Mine
    classes = Classes.of({"": mine, "a": mine, "a.norm": RMSNorm(4, Mesh.single()), "a.norm.x": nn.Dropout()})
    assert dict(classes.by_name) == {"": "Mine", "a": "Mine", "a.norm": "RMSNorm", "a.norm.x": "Dropout"}
    assert classes.own == {"", "a"}
    assert (classes.owner("a.norm.x"), classes.owner("b")) == ("a", "")
    assert classes.owner_class("a.norm") == "Mine"
    assert (classes.label(""), classes.label("a.norm")) == ("the layer (Mine)", "a.norm (RMSNorm)")


def test_a_class_of_the_package_is_told_from_one_of_torchs() -> None:
    assert is_packaged(RMSNorm(4, Mesh.single()))
    assert not is_packaged(nn.Dropout())
    assert list(around("a.b")) == ["a.b", "a", ""]
