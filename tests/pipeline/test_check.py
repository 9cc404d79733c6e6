"""What `check` refuses, and how it says so."""

import pytest

from megastack.errors import ScheduleError
from megastack.pipeline.action import Action
from megastack.pipeline.check import check
from megastack.pipeline.communication import with_communication
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.registry import build_schedule
from megastack.pipeline.simulate import simulate


def lists(*lines: str, microbatches: int | None = None) -> Schedule:
    rows = [[Action.parse(cell) for cell in line.split()] for line in lines]
    return Schedule.from_actions(rows, microbatches=microbatches)


@pytest.mark.parametrize(
    ("lines", "words", "mark"),
    [
        (("0F0 0B0 0F1", "1F0 1B0 1F1 1B1"), "rank 0: 0B1 is missing", ">(end)<"),
        (("0F0 0B0", "1F0 1B0 1F1 1B1"), "rank 0: 0F1 is missing", ">(end)<"),
        (("0F0 0I0", "1F0 1B0"), "rank 0: 0W0 is missing", ">(end)<"),
        (("0F0 0F0 0B0", "1F0 1B0"), "step 1: 0F0 is repeated", ">0F0<"),
        (("0F0 0B0 0B0", "1F0 1B0"), "step 2: 0B0 is repeated", ">0B0<"),
        (("0F0 0I0 0B0", "1F0 1B0"), "this backward is repeated", ">0B0<"),
        (("0F0 0B0 0W0", "1F0 1B0"), "this backward is repeated", ">0W0<"),
        (("0B0 0F0", "1F0 1B0"), "0B0 comes before 0F0", ">0B0<"),
        (("0F0 0W0 0I0", "1F0 1B0"), "0W0 comes before 0I0", ">0W0<"),
        (("0F0 0B0 1REDUCE_GRAD", "1F0 1B0"), "stage 1 is not on this rank", ">1REDUCE_GRAD<"),
        (
            ("0F0 0B0 0F1 0B1", "(1F0;1B0)OVERLAP_F_B (1B0;1F1)OVERLAP_F_B"),
            "1B0 is repeated",
            ">(1B0;1F1)OVERLAP_F_B<",
        ),
    ],
)
def test_incomplete_or_disordered_lists(lines: tuple[str, ...], words: str, mark: str) -> None:
    with pytest.raises(ScheduleError, match=words) as caught:
        check(lists(*lines))
    assert caught.value.grid is not None and mark in caught.value.grid
    assert caught.value.grid.count(">") == 1


def test_the_offending_action_is_a_value() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(lists("0F0 0B0 0B0", "1F0 1B0"))
    assert caught.value.action == Action("B", 0, 0)


def test_a_microbatch_too_many() -> None:
    with pytest.raises(ScheduleError, match="0F2: the step has only 2 microbatches"):
        check(lists("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1B1", microbatches=2))


def test_ranks_that_wait_for_each_other() -> None:
    crossed = lists("0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1")
    assert check(crossed).peaks == (2, 1)
    with pytest.raises(
        ScheduleError, match="rank 0 at 0B0, which waits for rank 1 at 1F1, which waits for rank 0"
    ) as e:
        check(lists("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert e.value.grid is not None and ">0B0<" in e.value.grid and "?1F1?" in e.value.grid


def test_the_grid_is_cut_to_what_matters() -> None:
    rows = build_schedule("1f1b", 64, 1, 128).ranks
    rows[50][100], rows[50][101] = rows[50][101], rows[50][100]
    rows[50].remove(Action("B", 50, 90))
    with pytest.raises(ScheduleError, match="50B90 is missing") as caught:
        check(Schedule.from_actions(rows))
    lines = str(caught.value.grid).splitlines()
    assert len(lines) <= 34 and max(map(len, lines)) < 200
    assert sum(">(end)<" in line for line in lines) == 1


def test_split_backward_frees_in_two_parts() -> None:
    schedule = lists("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    assert check(schedule).peaks == (2, 2)
    lines = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert check(lists(*lines)).peaks == (2, 1)


def test_parts_of_a_unit_count_one_by_one() -> None:
    schedule = lists("0F0 (0F1;0B0)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1")
    with pytest.raises(ScheduleError, match="no progress") as caught:
        check(lists("0F0 (0F1;0B1)OVERLAP_F_B 0B0", "1F0 1B0 1F1 1B1"))
    assert "OVERLAP_F_B<" in str(caught.value.grid), "0B1 needs 1B1, which needs what the unit itself makes"
    assert check(schedule).peaks == (2, 1)


def test_two_stages_of_one_rank_send_nothing() -> None:
    assert check(build_schedule("interleaved", 1, 4, 3)).sends == (0,)
    v_shaped = lists("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert check(v_shaped).sends == (2, 2)


SENT = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
)


def test_lists_that_name_their_messages() -> None:
    assert check(lists(*SENT)).sends == (2, 2)


@pytest.mark.parametrize(
    ("line", "old", "new", "words"),
    [
        (0, "0F1 0SEND_F1", "0SEND_F1 0F1", "0SEND_F1 comes before 0F1"),
        (0, " 0SEND_F1", "", "0SEND_F1 is missing"),
        (0, "0SEND_F1", "0SEND_F1 0SEND_F1", "0SEND_F1 is repeated"),
        (0, "0RECV_B1 0B1", "0B1", "0B1 comes before 0RECV_B1"),
        (0, "0F0", "0SEND_B0 0F0", "0SEND_B0 is not between two ranks"),
        (0, "0F0", "0RECV_F0 0F0", "0RECV_F0 is not between two ranks"),
        (1, "1B1", "1SEND_F1 1B1", "1SEND_F1 is not between two ranks"),
        (1, "1B1", "1RECV_B1 1B1", "1RECV_B1 is not between two ranks"),
        (1, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0 1B0 1SEND_B0", "follow its sends"),
        (1, "1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1", "1RECV_F1 1F1 1B1 1SEND_B1 1SEND_B0", "follow its sends"),
    ],
)
def test_faulty_messages(line: int, old: str, new: str, words: str) -> None:
    changed = list(SENT)
    changed[line] = changed[line].replace(old, new)
    assert changed != list(SENT)
    with pytest.raises(ScheduleError, match=words) as caught:
        check(lists(*changed))
    assert ">" in str(caught.value.grid)


def test_a_send_that_is_posted_too_late() -> None:
    late = (SENT[0].replace("0SEND_F1 0RECV_B0 0B0", "0RECV_B0 0B0 0SEND_F1"), SENT[1])
    check(lists(*late))
    held = (SENT[0].replace("0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0", "0F1 0RECV_B0 0B0 0SEND_F0 0SEND_F1"), SENT[1])
    with pytest.raises(ScheduleError, match="no progress: rank 1 at 1F0, which waits for rank 0 at 0B0"):
        check(lists(*held))


def test_neighbouring_messages_as_one_unit() -> None:
    """A receive behind which the rank's own send has to wait: fine in the background, a hang where units queue."""
    early = (
        "0F0 0RECV_B0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    check(lists(*early))
    earlier = ("0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B1 0B1", early[1])
    check(lists(*earlier), batched=False)
    with pytest.raises(ScheduleError, match="no progress") as caught:
        check(lists(*earlier))
    assert "RECV_B0" in str(caught.value)


def test_receives_right_before_use_would_hang_interleaved_ranks() -> None:
    """The placement that needs no thought: it hangs where a transport blocks, which is why the pass orders globally."""
    schedule = build_schedule("interleaved", 2, 2, 4)
    check(with_communication(schedule))
    with pytest.raises(ScheduleError, match="no progress"):
        check(right_before_use(schedule))
    check(right_before_use(schedule), batched=False)


def right_before_use(schedule: Schedule) -> Schedule:
    rows: list[list[Action]] = []
    for row in schedule.ranks:
        rows.append([])
        for action in row:
            s, m, forward = action.stage, action.microbatch, action.op == "F"
            if s > 0 if forward else s + 1 < schedule.stages:
                rows[-1].append(Action("RECV_F" if forward else "RECV_B", s, m))
            rows[-1].append(action)
            if s + 1 < schedule.stages if forward else s > 0:
                rows[-1].append(Action("SEND_F" if forward else "SEND_B", s, m))
    return Schedule.from_actions(rows)


def test_named_messages_time_like_generated_ones() -> None:
    schedule = build_schedule("interleaved", 3, 2, 5)
    assert simulate(with_communication(schedule)).times == simulate(schedule).times
