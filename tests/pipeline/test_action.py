"""Actions as values and as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from megastack.errors import ScheduleError
from megastack.pipeline.action import Action, Op, join, pack, split_steps, unpack_step

computations = st.builds(Action, st.sampled_from(["F", "B", "I", "W"]), st.integers(0, 10**5), st.integers(0, 10**5))
messages = st.builds(
    Action, st.sampled_from(["SEND_F", "RECV_F", "SEND_B", "RECV_B"]), st.integers(0, 99), st.integers(0, 99)
)
placed = st.builds(Action, st.sampled_from(["UNSHARD", "RESHARD", "REDUCE_GRAD"]), st.integers(0, 99))
overlaps = st.builds(
    lambda parts: Action(Op.OVERLAP_F_B, -1, None, tuple(parts)), st.lists(computations, min_size=2, max_size=4)
)
actions = computations | messages | placed | overlaps


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Op.F, 2, 0)),
        ("1I3", Action(Op.I, 1, 3)),
        ("1W3", Action(Op.W, 1, 3)),
        ("0SEND_F1", Action(Op.SEND_F, 0, 1)),
        ("1UNSHARD", Action(Op.UNSHARD, 1)),
        ("(0F1;1B2)OVERLAP_F_B", Action(Op.OVERLAP_F_B, -1, None, (Action(Op.F, 0, 1), Action(Op.B, 1, 2)))),
    ],
)
def test_text_form(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text


@settings(deadline=None, max_examples=60)
@given(actions)
def test_text_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


@settings(deadline=None, max_examples=60)
@given(st.lists(actions, max_size=8))
def test_packed_round_trip(row: list[Action]) -> None:
    codes = [packed for action in row for packed in pack(action)]
    assert [unpack_step(parts) for parts in split_steps(codes)] == row
    assert [packed for parts in split_steps(codes) for packed in join(parts)] == codes


@settings(deadline=None, max_examples=60)
@given(actions)
def test_text_is_read_by_torch(action: Action) -> None:
    theirs = _Action.from_str(str(action))
    assert str(theirs) == str(action)
    assert theirs.computation_type.value == action.op.value


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2UNSHARD1", "-1F0", "2F0 3F0", "(0F1;1B2)", "(0F1)F", "2f0"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ScheduleError, match="numbered below"):
        pack(Action(Op.F, 1 << 24, 0))


def test_compute_actions() -> None:
    assert Action.parse("(0F1;1B2)OVERLAP_F_B").is_compute and Action("W", 0, 0).is_compute
    assert not Action("SEND_F", 0, 0).is_compute
