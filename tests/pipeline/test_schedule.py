"""Schedules as values: the ranks of stages, and files of actions."""

from pathlib import Path

import pytest

from megastack.errors import ScheduleError
from megastack.pipeline.action import Action
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.registry import build_schedule


def rows(*lines: str) -> list[list[Action]]:
    return [[Action.parse(cell) for cell in line.split()] for line in lines]


def test_stages_are_derived_from_the_lists() -> None:
    schedule = Schedule.from_actions(rows("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"))
    assert (schedule.pp, schedule.chunks, schedule.stages, schedule.microbatches) == (2, 2, 4, 1)
    assert schedule.stage_ranks == (0, 1, 1, 0)
    assert schedule.rank_stages(1) == [1, 2]
    assert [schedule.chunk(stage) for stage in range(4)] == [0, 0, 1, 1]


def test_actions_are_given_as_values_or_as_text() -> None:
    values = [[Action.parse("0F0"), Action.parse("0B0")]]
    assert Schedule.from_actions([["0F0", "0B0"]]) == Schedule.from_actions(values)
    with pytest.raises(ScheduleError, match="'X' is not an op"):
        Schedule.from_actions([["0X0"]])


def test_equal_lists_are_equal_values() -> None:
    first, second = build_schedule("1f1b", 3, 1, 4), build_schedule("1f1b", 3, 1, 4)
    assert first == second and hash(first) == hash(second)
    first.ranks[0].clear()
    assert first.ranks[0] == second.ranks[0], "the lists are copies"


def test_a_stage_is_on_one_rank() -> None:
    with pytest.raises(ScheduleError, match="stage 0 is on rank 0") as caught:
        Schedule.from_actions(rows("0F0 0B0", "1F0 0B1 1B0"))
    assert ">0B1<" in str(caught.value) and caught.value.action == Action("B", 0, 1)


@pytest.mark.parametrize("lines", [("0F0 0B0", "2F0 2B0"), ("", "")])
def test_every_stage_is_on_a_rank(lines: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError, match="no rank runs"):
        Schedule.from_actions(rows(*lines))


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_file_round_trip(tmp_path: Path, name: str) -> None:
    schedule = build_schedule(name, 3, 2, 5)
    schedule.dump(tmp_path / "lists.csv")
    assert Schedule.load(tmp_path / "lists.csv", name=name) == schedule


def test_idle_cells_of_torch_files_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lists.csv"
    path.write_text("0F0,,,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD\n,1F0,1B0,1F1,1B1,\n")
    schedule = Schedule.load(path)
    assert [str(action) for action in schedule.ranks[0]] == ["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1", "0REDUCE_GRAD"]
    assert schedule.microbatches == 2


def test_a_file_dumped_by_torch_loads(tmp_path: Path) -> None:
    import csv

    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, _Action

    path = tmp_path / "torch.csv"
    ours = build_schedule("interleaved", 2, 2, 4)
    order = {rank: [None] * rank + [_Action.from_str(str(a)) for a in row] for rank, row in enumerate(ours.ranks)}

    class Written(ScheduleInterleaved1F1B):
        def __init__(self) -> None:
            self.pipeline_order = order

    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    PipelineScheduleMulti._dump_csv(Written(), str(path))
    assert len(list(csv.reader(path.open()))) == 2
    assert Schedule.load(path, name="interleaved") == ours


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("0F0,0X0\n", "line 1, column 2"),
        ("0F0\n0F0,1F\n", "line 2, column 2"),
        (None, "cannot be read"),
    ],
)
def test_invalid_files_are_errors(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "lists.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ScheduleError, match=words) as caught:
        Schedule.load(path)
    assert str(path) in str(caught.value)
