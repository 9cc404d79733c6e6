"""Sends and receives: one channel for each pair of ranks, posted early, in one global order."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.errors import ScheduleError
from megastack.pipeline.action import Action
from megastack.pipeline.check import check
from megastack.pipeline.communication import with_communication
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.registry import build_schedule

sizes = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9))


def test_1f1b_by_hand() -> None:
    lists = with_communication(build_schedule("1f1b", 2, 1, 2)).ranks
    assert " ".join(map(str, lists[0])) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert " ".join(map(str, lists[1])) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


@settings(deadline=None, max_examples=40)
@given(sizes, st.sampled_from(["gpipe", "interleaved"]), st.integers(0, 2))
def test_channels_are_first_in_first_out(size: tuple[int, int, int], name: str, ahead: int) -> None:
    schedule = build_schedule(name, *size)
    lists = with_communication(schedule, receive_lead=ahead)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(lists.ranks):
        seen: set[str] = set()
        for action in row:
            s, m, op = action.stage, action.microbatch, str(action.op)
            if op.startswith("SEND"):
                assert f"{s}{op[-1]}{m}" in seen, "a send stands behind what makes its value"
                other = s + 1 if op == "SEND_F" else s - 1
                sent[rank, schedule.stage_rank(other)].append(f"{other}RECV_{op[-1]}{m}")
            elif op.startswith("RECV"):
                received[schedule.stage_rank(s - 1 if op == "RECV_F" else s + 1), rank].append(str(action))
            else:
                first, last = s == 0, s == schedule.stages - 1
                local = size[0] == 1 or (first if op == "F" else last)
                assert local or f"{s}RECV_{op}{m}" in seen, "a receive stands before its use"
            seen.add(str(action))
    assert sent == received
    assert [[a for a in row if a.is_compute] for row in lists.ranks] == schedule.ranks


@settings(deadline=None, max_examples=30)
@given(sizes, st.integers(1, 3))
def test_receives_ahead_still_make_progress(size: tuple[int, int, int], ahead: int) -> None:
    lists = with_communication(build_schedule("interleaved", *size), receive_lead=ahead)
    check(lists, batched=False)


def test_receives_move_up_by_whole_computations() -> None:
    schedule = build_schedule("1f1b", 4, 1, 8)

    def lead(ahead: int) -> int:
        """Computations between the posting of the receives and their use, over all ranks."""
        total = 0
        for row in with_communication(schedule, receive_lead=ahead).ranks:
            posted: dict[str, int] = {}
            done = 0
            for action in row:
                if str(action.op).startswith("RECV"):
                    posted[f"{action.stage}{str(action.op)[-1]}{action.microbatch}"] = done
                elif action.is_compute:
                    total += done - posted.get(str(action), done)
                    done += 1
        return total

    assert lead(0) < lead(1) < lead(2)


def test_stages_of_one_rank_exchange_nothing() -> None:
    rows = [[Action.parse(cell) for cell in line.split()] for line in ("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")]
    lists = with_communication(Schedule.from_actions(rows)).ranks
    assert [str(a) for a in lists[1]] == ["1RECV_F0", "1F0", "2F0", "2SEND_F0", "2RECV_B0", "2B0", "1B0", "1SEND_B0"]


def test_values_of_a_unit_are_sent_behind_the_unit() -> None:
    rows = [
        [Action.parse(cell) for cell in line.split()]
        for line in ("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1 1REDUCE_GRAD")
    ]
    lists = with_communication(Schedule.from_actions(rows)).ranks
    words = [str(a) for a in lists[1]]
    assert words[words.index("(1F1;1B0)OVERLAP_F_B") + 1 :] == ["1SEND_B0", "1B1", "1SEND_B1", "1REDUCE_GRAD"]


def test_it_is_added_once() -> None:
    with pytest.raises(ScheduleError, match="already"):
        with_communication(with_communication(build_schedule("1f1b", 2, 1, 2)))


def test_one_rank_has_none() -> None:
    schedule = build_schedule("interleaved", 1, 3, 4)
    assert with_communication(schedule) == schedule
