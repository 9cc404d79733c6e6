"""The runtime on NCCL, by a model of it: no deadlock, and memory for messages that follows from the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest

from megastack.config.choices import Device
from megastack.config.compose import compose
from megastack.config.convert import replace_values
from megastack.config.rules import violations
from megastack.errors import ScheduleError
from megastack.pipeline.check import check
from megastack.pipeline.communication import with_communication
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.registry import build_schedule, schedule_violations
from tests.pipeline.nccl_model import deadlocks, record

Case = tuple[str, int, int, int]
NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2")


def cases(degrees: Iterable[int], chunks: Iterable[int], microbatches: Iterable[int]) -> list[Case]:
    every = itertools.product(NAMES, degrees, chunks, microbatches)
    return [case for case in every if not schedule_violations(*case)]


SAMPLE = cases((2, 3), (1, 2), (1, 2, 5))
EVERY = cases((2, 3, 4, 5, 8), (1, 2, 3, 4), (1, 2, 3, 4, 5, 7, 8, 9, 16))


def stuck(
    schedule: Schedule, *, eager: bool = False, forwards: bool = False, groups: int = 2, receive_lead: int = 0
) -> bool:
    chosen = {"forwards": forwards, "groups": groups, "receive_lead": receive_lead}
    records = [record(schedule, rank, steps=2, **chosen) for rank in range(schedule.pp)]  # type: ignore[arg-type]
    return deadlocks(records, eager=eager)


def count_stuck(chosen: list[Case], **kind: object) -> int:
    return sum(stuck(build_schedule(*case), **kind) for case in chosen)  # type: ignore[arg-type]


KINDS = {"lazy": {}, "eager": {"eager": True}, "forwards": {"forwards": True}}


@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_deadlocks(kind: str) -> None:
    assert len(SAMPLE) > 20
    assert count_stuck(SAMPLE, **KINDS[kind]) == 0


def test_receives_that_are_posted_ahead_deadlock() -> None:
    assert (len(SAMPLE), count_stuck(SAMPLE, receive_lead=1)) == (42, 2)


def test_one_process_group_for_both_directions_deadlocks() -> None:
    schedule = build_schedule("gpipe", 2, 2, 3)
    assert stuck(schedule, eager=True, groups=1)
    assert stuck(schedule, groups=1)


def probed(chosen: list[Case]) -> list[Case]:
    """Without interleaved schedules of one chunk, which equal 1F1B."""
    return [(name, pp, chunks, count) for name, pp, chunks, count in chosen if name != "interleaved" or chunks > 1]


@pytest.mark.full
def test_the_negative_controls_deadlock_in_as_many_cases_as_before() -> None:
    """The numbers show that the model still finds what it is for.

    A model whose hosts also wait for the data of a message finds 254 deadlocks of early receives.
    """
    one_group = probed(cases((2, 3, 4, 5, 8), (1, 2, 3), (1, 2, 3, 4, 5, 8, 9, 16)))
    assert (len(one_group), count_stuck(one_group, eager=True, groups=1)) == (320, 42)
    assert (len(probed(EVERY)), count_stuck(probed(EVERY), receive_lead=1)) == (450, 42)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_of_any_size_deadlocks(kind: str) -> None:
    assert count_stuck(EVERY, **KINDS[kind]) == 0


def held(schedule: Schedule) -> tuple[list[int], list[int]]:
    """The most message tensors of each rank, in the first step (with headers) and in the second."""
    peaks = [record(schedule, rank, steps=2).peaks for rank in range(schedule.pp)]
    return [first for first, _ in peaks], [second for _, second in peaks]


def check_memory(case: Case) -> None:
    schedule = build_schedule(*case)
    predicted = check(schedule).messages
    first, second = held(schedule)
    assert tuple(second) == predicted, case
    assert all(a <= b for a, b in zip(first, predicted, strict=True)), case


@pytest.mark.parametrize(
    "case", [("1f1b", 2, 1, 64), ("gpipe", 3, 2, 8), ("interleaved", 2, 3, 9), ("zb_h2", 3, 1, 9)], ids=str
)
def test_messages_alive_are_those_of_the_schedule(case: Case) -> None:
    check_memory(case)


@pytest.mark.full
@pytest.mark.parametrize("case", cases((2, 3, 4, 8), (1, 2, 3, 4), (64,)), ids=str)
def test_messages_alive_are_those_of_every_schedule(case: Case) -> None:
    check_memory(case)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
def test_messages_do_not_grow_with_the_microbatches(name: str) -> None:
    most = [check(build_schedule(name, 4, 1, microbatches)).messages for microbatches in (16, 64)]
    assert most[0] == most[1]
    assert max(most[0]) <= 8


def test_the_lists_with_their_messages_have_the_same_figures() -> None:
    schedule = build_schedule("interleaved", 3, 2, 7)
    assert check(with_communication(schedule)) == check(schedule)


AHEAD = "0RECV_B0 0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0\n"
"""Rank 0 posts a receive before the send that its peer needs: NCCL runs them in order."""


def custom(path: Path, device: str) -> list[str]:
    changes = {"parallel.pp": 2, "batch.global_size": 1, "batch.micro_size": 1}
    config = replace_values(
        compose(["experiment=parity"]), changes | {"device": Device(device), "schedule.name": "custom"}
    )
    config = replace_values(config, {"schedule.path": str(path)})
    return [str(violation) for violation in violations(config) if violation.key.startswith("schedule")]


def test_lists_that_could_deadlock_on_a_gpu_are_valid_on_a_cpu_only(tmp_path: Path) -> None:
    path = tmp_path / "lists.csv"
    path.write_text(AHEAD.replace(" ", ","))
    assert custom(path, "cpu") == []
    (found,) = custom(path, "cuda")
    assert "can deadlock on GPUs" in found and "use lists without sends and receives" in found
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert custom(path, "cuda") == []


def test_the_runtime_rejects_such_lists_on_a_gpu(tmp_path: Path) -> None:
    """Where the device is chosen automatically, no rule knows it before the start."""
    path = tmp_path / "lists.csv"
    path.write_text(AHEAD.replace(" ", ","))
    schedule = build_schedule("custom", 2, 1, 1, path=str(path))
    with pytest.raises(ScheduleError, match="no progress"):
        record(schedule, 0)
