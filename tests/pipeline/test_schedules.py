"""The schedules themselves: closed forms, torch's own orders, names and options."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megastack.errors import ScheduleError
from megastack.pipeline.action import Action
from megastack.pipeline.check import check
from megastack.pipeline.schedules import registry
from megastack.pipeline.schedules.interleaved import forward_only, rounds
from megastack.pipeline.schedules.registry import (
    PLANNED,
    build_schedule,
    closed_form,
    known_names,
    register_schedule,
    schedule_names,
    schedule_violations,
    splits_backward,
)
from megastack.pipeline.simulate import Costs, simulate

EVERY_M = range(1, 17)


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    for pp in range(1, 9):
        for chunks in range(1, 2 if name == "1f1b" else 5):
            for microbatches in EVERY_M:
                yield pp, chunks, microbatches


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_closed_forms_equal_the_simulation(name: str) -> None:
    for pp, chunks, microbatches in sizes(name):
        timeline = simulate(build_schedule(name, pp, chunks, microbatches), Costs(F=3.0, I=2.0, W=5.0))
        idle = ((pp - 1) + (chunks - 1) * max(0, pp - microbatches)) * 10.0 / chunks
        formula = closed_form(name, pp, chunks, microbatches)
        assert formula is not None
        where = f"{name} p={pp} v={chunks} M={microbatches}"
        assert timeline.makespan == pytest.approx(microbatches * 10.0 + idle, rel=1e-12), where
        assert timeline.bubble == pytest.approx(formula.bubble, abs=1e-12), where
        assert timeline.step_bubble == pytest.approx(timeline.bubble, abs=1e-12), where
        assert timeline.peaks == formula.peaks, where
        assert [peak * chunks for peak in timeline.peaks] == pytest.approx(chunk_peaks(name, pp, chunks, microbatches))


def chunk_peaks(name: str, pp: int, chunks: int, microbatches: int) -> list[int]:
    """The published formulas, written independently."""
    if name == "gpipe":
        return [microbatches * chunks] * pp
    if name == "1f1b":
        return [min(microbatches, pp - rank) for rank in range(pp)]
    first_round = -(-microbatches // max(1, microbatches // pp))
    warm = [2 * (pp - rank - 1) + (chunks - 1) * first_round for rank in range(pp)]
    return [min(microbatches * chunks, forwards + 1) for forwards in warm]


@pytest.mark.parametrize(
    ("microbatches", "peaks"),
    [(1, [1, 1, 1, 1]), (2, [2, 2, 2, 1]), (3, [3, 3, 2, 1]), (4, [4, 3, 2, 1]), (8, [4, 3, 2, 1])],
)
def test_fewer_microbatches_than_stages(microbatches: int, peaks: list[int]) -> None:
    schedule = build_schedule("1f1b", 4, 1, microbatches)
    assert list(check(schedule).peaks) == peaks
    for stage, row in enumerate(schedule.ranks):
        assert sorted(map(str, row)) == sorted(f"{stage}{op}{m}" for op in "FB" for m in range(microbatches))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_they_pass_the_check(name: str) -> None:
    for pp, chunks, microbatches in sizes(name):
        if microbatches in (1, 2, 3, 4, 7, 16) and pp in (1, 2, 3, 5, 8):
            report = check(build_schedule(name, pp, chunks, microbatches))
            boundaries = pp * chunks - 1 if pp > 1 else 0
            assert sum(report.sends) == 2 * boundaries * microbatches
            assert report.actions == 2 * pp * chunks * microbatches


def test_1f1b_runs_in_the_order_of_torch() -> None:
    for pp in range(1, 9):
        for microbatches in range(pp, 17):
            ours = build_schedule("1f1b", pp, 1, microbatches).ranks
            for rank in range(pp):
                assert list(map(str, ours[rank])) == torch_1f1b(pp, rank, microbatches)


def torch_1f1b(pp: int, rank: int, microbatches: int) -> list[str]:
    """What torch's Schedule1F1B calls on its stage, with nothing to send."""
    from torch.distributed.pipelining.schedules import Schedule1F1B

    class Recorder:
        stage_index, is_first, is_last = rank, rank == 0, rank == pp - 1

        def __init__(self) -> None:
            self.calls: list[str] = []

        def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
            self.calls.append(f"{rank}F{microbatch}")

        def backward_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
            self.calls.append(f"{rank}B{microbatch}")

        def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
            return []

        get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

        def perform_reduce_grad(self, scale: int) -> None:
            pass

    class Driven(Schedule1F1B):
        def __init__(self) -> None:
            self._stage, self._num_stages, self._n_microbatches = Recorder(), pp, microbatches
            self.scale_grads, self._loss_fn, self._internal_losses = False, None, []

        def _initialize_stage(self, *args: Any, **kwargs: Any) -> None:
            pass

    driven = Driven()
    driven._step_microbatches([()] * microbatches, [{}] * microbatches)
    return driven._stage.calls


def test_interleaved_is_in_the_order_of_torch() -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    compared = 0
    for pp, chunks, microbatches in sizes("interleaved"):
        count = max(1, microbatches // pp)
        if microbatches % count:
            continue
        parameters = SimpleNamespace(
            n_local_stages=chunks,
            microbatches_per_round=microbatches // count,
            pp_group_size=pp,
            _n_microbatches=microbatches,
        )
        ours = build_schedule("interleaved", pp, chunks, microbatches).ranks
        for rank in range(pp):
            theirs = ScheduleInterleaved1F1B._calculate_single_rank_operations(parameters, rank)
            assert [str(action) for action in theirs if action is not None] == list(map(str, ours[rank]))
            compared += 1
    assert compared > 1000


def test_gpipe_is_in_the_order_of_torch() -> None:
    from torch.distributed.pipelining.schedules import ScheduleGPipe

    theirs = ScheduleGPipe._get_pipeline_order(SimpleNamespace(_num_stages=4, _n_microbatches=6))
    for rank, row in enumerate(build_schedule("gpipe", 4, 1, 6).ranks):
        assert [str(a) for a in theirs[rank] if a and "REDUCE" not in str(a)] == list(map(str, row))


def test_rounds_are_near_equal_and_larger_first() -> None:
    assert rounds(4, 10) == [5, 5]
    assert rounds(4, 11) == [6, 5]
    assert rounds(4, 3) == [3]
    assert rounds(8, 31) == [11, 10, 10]
    for pp, _, microbatches in sizes("1f1b"):
        assert sum(rounds(pp, microbatches)) == microbatches
        assert min(rounds(pp, microbatches)) >= min(pp, microbatches)


def test_a_round_is_used_or_invalid() -> None:
    for pp in (2, 3, 4):
        for microbatches in range(1, 10):
            for size in range(1, microbatches + 1):
                whole = [size] * (microbatches // size) + [microbatches % size] * bool(microbatches % size)
                if min(whole) < min(pp, microbatches):
                    with pytest.raises(ScheduleError, match=f"schedule.round={size}: .*at least"):
                        build_schedule("interleaved", pp, 2, microbatches, round=size)
                    continue
                schedule = build_schedule("interleaved", pp, 2, microbatches, round=size)
                check(schedule)
                formula = closed_form("interleaved", pp, 2, microbatches, round=size)
                assert formula is not None
                assert simulate(schedule).bubble == pytest.approx(formula.bubble, abs=1e-12)
                assert simulate(schedule).peaks == formula.peaks


def test_a_fixed_round_of_p_would_deadlock() -> None:
    from megastack.pipeline.schedule import Schedule
    from megastack.pipeline.schedules.interleaved import interleaved

    with pytest.raises(ScheduleError, match="no progress") as caught:
        check(Schedule.from_actions(interleaved(4, 3, 5, round=4)))
    assert ">" in str(caught.value.grid) and "which waits for" in str(caught.value)


@pytest.mark.parametrize("name", PLANNED)
def test_planned_schedules_are_known_and_rejected(name: str) -> None:
    assert name in known_names() and name not in schedule_names()
    with pytest.raises(
        ScheduleError,
        match=f"schedule.name={name}: is not available yet; use gpipe, 1f1b, interleaved, zb_h1, zb_h2 or custom",
    ):
        build_schedule(name, 2, 1, 4)


@pytest.mark.parametrize(
    ("name", "arguments", "options", "words"),
    [
        ("nope", (2, 1, 4), {}, "schedule.name=nope: is not a schedule"),
        ("1f1b", (2, 2, 4), {}, "schedule.chunks=2: .*schedule.name=interleaved"),
        ("zb_h2", (2, 2, 4), {}, "schedule.chunks=2: .*schedule.name=interleaved"),
        ("zb_h1", (2, 1, 4), {"round": 2}, "schedule.round=2: .*takes no such option"),
        ("1f1b", (2, 1, 4), {"round": 2}, "schedule.round=2: .*takes no such option"),
        ("gpipe", (2, 1, 4), {"path": "x"}, "schedule.path=x: .*takes no such option"),
        ("interleaved", (0, 1, 4), {}, "parallel.pp=0: must be at least 1"),
        ("interleaved", (2, 0, 4), {}, "schedule.chunks=0"),
        ("gpipe", (2, 1, 0), {}, "microbatches=0"),
        ("custom", (2, 1, 4), {}, "schedule.path=null: .*needs it"),
    ],
)
def test_invalid_arguments_are_rejected(
    name: str, arguments: tuple[int, int, int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ScheduleError, match=words):
        build_schedule(name, *arguments, **options)
    assert schedule_violations(name, *arguments, **options)


def test_options_that_are_null_are_not_given() -> None:
    assert build_schedule("1f1b", 2, 1, 4, round=None, path=None) == build_schedule("1f1b", 2, 1, 4)
    assert schedule_violations("interleaved", 2, 2, 4, round=None) == []


def test_unsupported_actions_of_lists_are_located(tmp_path: Path) -> None:
    path = tmp_path / "lists.csv"
    path.write_text("0F0,0UNSHARD,0B0\n1F0,1B0\n")
    with pytest.raises(
        ScheduleError, match=r"rank 0, step 1: 0UNSHARD is not an action that the runtime executes; use F, B, "
    ):
        build_schedule("custom", 2, 1, 1, path=str(path))


def test_custom_lists_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    build_schedule("gpipe", 2, 2, 3).dump(path)
    schedule = build_schedule("custom", 2, 2, 3, path=str(path))
    assert schedule.name == "custom" and schedule.ranks == build_schedule("gpipe", 2, 2, 3).ranks
    with pytest.raises(ScheduleError, match="pp=2, chunks=2, microbatches=3 and 4 stages, not for"):
        build_schedule("custom", 2, 2, 4, path=str(path))
    path.write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(ScheduleError, match="0B1 is missing"):
        build_schedule("custom", 2, 1, 2, path=str(path))


def test_a_users_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))

    @register_schedule("one_by_one")
    def one_by_one(pp: int, chunks: int, microbatches: int, *, faulty: bool = False) -> list[list[Action]]:
        ops = "BF" if faulty else "FB"
        return [[Action(op, rank, m) for m in range(microbatches) for op in ops] for rank in range(pp)]

    assert "one_by_one" in schedule_names()
    assert check(build_schedule("one_by_one", 3, 1, 2)).peaks == (1, 1, 1)
    assert closed_form("one_by_one", 3, 1, 2) is None
    with pytest.raises(ScheduleError, match="0B0 comes before 0F0"):
        build_schedule("one_by_one", 3, 1, 2, faulty=True)
    with pytest.raises(ScheduleError, match="one_by_one takes no such option"):
        build_schedule("one_by_one", 3, 1, 2, round=1)


def test_names_are_taken_once() -> None:
    for name in ("1f1b", "zb_h1", "zb_auto"):
        with pytest.raises(ScheduleError, match="is taken"):
            register_schedule(name)(lambda pp, chunks, microbatches: [])


def test_stages_go_round_the_ranks() -> None:
    schedule = build_schedule("interleaved", 4, 3, 8)
    assert [schedule.rank_stages(rank) for rank in range(4)] == [[r, r + 4, r + 8] for r in range(4)]
    assert forward_only(4, 3, 5).stage_ranks == schedule.stage_ranks


def test_forward_only_runs_each_stage_once_at_every_size() -> None:
    for pp, chunks, microbatches in sizes("interleaved"):
        if microbatches in (1, 2, 3, 5, 8) and pp in (1, 2, 3, 5, 8):
            schedule = forward_only(pp, chunks, microbatches)
            report = check(schedule)
            assert report.actions == pp * chunks * microbatches
            assert set(report.peaks) == {0.0}, "nothing is kept for a backward"


def test_forward_only_keeps_the_stage_ranks_of_training() -> None:
    schedule = forward_only(2, 2, 3, stage_ranks=(0, 1, 1, 0))
    assert schedule.stage_ranks == (0, 1, 1, 0)
    assert check(schedule).sends == (3, 3)
    with pytest.raises(ScheduleError, match="at least 1"):
        forward_only(2, 1, 0)


def flavoured(pp: int, chunks: int, microbatches: int, *, flavour: str = "plain") -> list[list[Action]]:
    order = range(microbatches)[:: -1 if flavour == "reversed" else 1]
    return [[Action.parse(f"0F{m}") for m in order] + [Action.parse(f"0B{m}") for m in order]]


def with_default(pp: int, chunks: int, microbatches: int, reverse: bool = False) -> list[list[Action]]:
    return flavoured(pp, chunks, microbatches, flavour="reversed" if reverse else "plain")


def needs_depth(pp: int, chunks: int, microbatches: int, *, depth: int) -> list[list[Action]]:
    return flavoured(pp, chunks, microbatches)


def without_sizes() -> list[list[Action]]:
    return []


def not_actions(pp: int, chunks: int, microbatches: int) -> str:
    return "actions"


def numbers(pp: int, chunks: int, microbatches: int) -> int:
    return pp


def of_two_microbatches(pp: int, chunks: int, microbatches: int) -> list[list[Action]]:
    return flavoured(pp, chunks, 2)


def raises(pp: int, chunks: int, microbatches: int) -> list[list[Action]]:
    return [[1 // 0]]


HERE = "tests.pipeline.test_schedules"


def test_a_dotted_path_names_a_function_and_its_options() -> None:
    schedule = build_schedule(f"{HERE}.flavoured", 1, 1, 3, flavour="reversed")
    assert str(schedule.ranks[0][0]) == "0F2" and schedule.name == f"{HERE}.flavoured"
    assert not splits_backward(f"{HERE}.flavoured", 1, 1, 3)
    assert closed_form(f"{HERE}.flavoured", 1, 1, 3) is None
    assert str(build_schedule(f"{HERE}.with_default", 1, 1, 3, reverse=True).ranks[0][0]) == "0F2"


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("nowhere.fn", {}, "schedule._target_=nowhere.fn: importing nowhere failed with ModuleNotFoundError"),
        (f"{HERE}.flavored", {}, f"schedule._target_={HERE}.flavored: {HERE} has no class or function .*use flavoured"),
        (
            f"{HERE}.flavoured",
            {"flavor": "x"},
            f"schedule.flavor=x: must be an option of {HERE}.flavoured; use flavour",
        ),
        (f"{HERE}.needs_depth", {}, f"schedule.depth=null: must be set; {HERE}.needs_depth requires it"),
        (f"{HERE}.without_sizes", {}, r"must accept three positional arguments; use \(pp, chunks, microbatches"),
        (f"{HERE}.not_actions", {}, "must return a valid schedule: 'a' is not an action"),
        (f"{HERE}.numbers", {}, "must return a list of actions for each rank, got TypeError"),
        (
            f"{HERE}.of_two_microbatches",
            {},
            "must return a valid schedule: its lists are for pp=1, chunks=1, microbatches=2",
        ),
        (f"{HERE}.raises", {}, "must return a list of actions for each rank, got ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_error(path: str, options: dict[str, str], message: str) -> None:
    [violation] = schedule_violations(path, 1, 1, 3, **options)
    assert re.search(message, str(violation)), str(violation)
    with pytest.raises(ScheduleError):
        build_schedule(path, 1, 1, 3, **options)
