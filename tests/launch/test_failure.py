"""Which failure is reported, from the reports of ranks and the exits that the launcher observed."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from megastack.comm.flight_recorder import Operation
from megastack.errors import CheckpointError, ConfigError, LayerError
from megastack.launch.failure import ObservedExits, explains_itself, failure_of, find_failure, rejects_configuration
from megastack.mesh.shape import MeshShape
from megastack.observe.failure import FailureRecord
from megastack.observe.files import cannot_write
from megastack.observe.watchdog import RankState
from tests.tiny_runs import status, train

SHAPE = MeshShape(pp=3)
WAIT = Operation("pp", "all_reduce", 4, (5,), (0, 1, 2))


def record(rank: int, *, echo: bool) -> FailureRecord:
    return FailureRecord(rank, f"pp{rank} dp0 tp0", rank, 2, "training step 3", "E: m", "trace", "m", echo)


def report(rank: int, seconds: float, waiting: Operation | None = WAIT, number: int = 4) -> RankState:
    counts = {WAIT.channel: number}
    return RankState(rank, f"pp{rank} dp0 tp0", 0, "training step 3", seconds, waiting, counts, [], [], [], WAIT)


def test_a_rank_that_failed_by_itself_comes_first() -> None:
    failure = find_failure(
        [record(1, echo=False), record(0, echo=True)], [report(0, 9)], ObservedExits(0, {0: 1}), SHAPE, 10
    )
    assert (failure.rank, failure.reason, failure.step) == (1, "E: m", 2)
    assert failure.text.splitlines()[-1] == "[rank 1 | pp1 dp0 tp0] failed in training step 3: E: m"


def test_a_killed_rank_is_named_with_its_signal_and_the_ranks_that_wait() -> None:
    echoes = [record(0, echo=True), record(2, echo=True)]
    failure = find_failure(
        echoes, [report(0, 1), report(2, 1)], ObservedExits(0, {0: 1, 1: -signal.SIGKILL}), SHAPE, 10
    )
    assert (failure.rank, failure.reason) == (1, "ended by SIGKILL")
    assert failure.text.count("waits for pp all_reduce 4 of [5]") == 2


def test_a_rank_that_stopped_calling_is_told_from_one_that_died_by_how_long_others_waited() -> None:
    echoes, reports = [record(0, echo=True), record(2, echo=True)], [report(0, 10), report(2, 9.9)]
    failure = find_failure(echoes, reports, ObservedExits(0, {0: 1}), SHAPE, 10)
    assert (failure.rank, failure.coordinates) == (1, "pp1 dp0 tp0")
    assert failure.reason == "did not arrive at pp all_reduce 4 of [5] within launch.timeout_s=10"
    assert failure.text.endswith(f"[rank 1 | pp1 dp0 tp0] {failure.reason}")


def test_without_reports_a_rank_without_a_word_is_named_else_the_first_echo() -> None:
    failure = find_failure([record(0, echo=True), record(2, echo=True)], [], ObservedExits(0, {0: 1}), SHAPE, 10)
    assert failure.rank == 1 and failure.reason.startswith("ended without a traceback")
    killed = find_failure([], [], ObservedExits(0, {0: -9}, "received SIGTERM and did not stop"), SHAPE, 10)
    assert killed.reason == "received SIGTERM and did not stop"
    assert (
        find_failure([record(rank, echo=True) for rank in (2, 0, 1)], [], ObservedExits(0, {0: 1}), SHAPE, 10).rank == 2
    )


def test_the_rank_that_others_waited_for_is_named_whatever_it_reports_when_it_comes() -> None:
    """Rank 1 slept, woke up and found the connection closed: all three have a record, and its own is the first."""
    records = [record(rank, echo=True) for rank in (1, 0, 2)]
    reports = [report(0, 3), report(1, 3, None, number=3), report(2, 1)]
    failure = find_failure(records, reports, ObservedExits(1, {1: 1}), SHAPE, 3)
    assert (failure.rank, failure.reason) == (1, "did not arrive at pp all_reduce 4 of [5] within launch.timeout_s=3")


def test_the_last_to_arrive_is_named_where_it_wrote_its_report_after_the_others_gave_up() -> None:
    now = 1_000_000_000_000
    reports = [replace(report(rank, seconds), time_ns=now) for rank, seconds in ((0, 3.1), (1, 0.1), (2, 3.0))]
    failure = find_failure([record(rank, echo=True) for rank in (0, 1, 2)], reports, ObservedExits(0, {0: 1}), SHAPE, 3)
    assert (failure.rank, failure.text.count("waits for pp all_reduce 4 of [5]")) == (1, 2)
    together = [replace(found, seconds=3.0) for found in reports]
    assert find_failure([record(2, echo=True)], together, ObservedExits(2, {2: 1}), SHAPE, 3).rank == 0, (
        "the first without a record"
    )


def test_operations_that_no_report_knows_leave_the_rank_that_outlasted_the_time_out() -> None:
    """Collectives of a user's layer: the time-out is seen, and who did not end is."""
    echoes, idle = [record(0, echo=True), record(2, echo=True)], [report(rank, 3, None) for rank in range(3)]
    seen = ObservedExits(0, {0: 1, 1: -signal.SIGKILL}, stragglers={1})
    failure = find_failure(echoes, idle, seen, SHAPE, 3)
    assert (failure.rank, failure.reason) == (1, "did not end within launch.grace_s, and was killed")
    assert failure.text.startswith("[rank 1 | pp1 dp0 tp0] issued no operation for 3 s in training step 3\n")
    early = [report(rank, 1, None) for rank in range(3)]
    assert find_failure(echoes, early, seen, SHAPE, 3).rank == 0, "a rank that waits outlasts the failure as well"


def test_ranks_that_nccl_aborted_are_victims_of_a_time_out() -> None:
    aborted = {0: -signal.SIGABRT, 2: -signal.SIGABRT}
    waits = [report(0, 3, None), report(1, 3, None, number=3), report(2, 3, None)]
    slept = find_failure([], waits, ObservedExits(0, aborted, stragglers={1}), SHAPE, 3)
    assert (slept.rank, slept.reason) == (1, "did not arrive at pp all_reduce 4 of [5] within launch.timeout_s=3")
    unknown = [report(rank, 3, None) for rank in range(3)]
    assert find_failure([], unknown, ObservedExits(0, aborted | {1: -signal.SIGKILL}), SHAPE, 3).rank == 1
    crashed = find_failure([], [report(0, 0.5, None)], ObservedExits(2, {2: -signal.SIGABRT, 0: -9, 1: -9}), SHAPE, 3)
    assert (crashed.rank, crashed.reason) == (2, "ended by SIGABRT")


def test_a_rank_that_died_is_preferred_to_ranks_that_were_killed_for_it() -> None:
    codes = {0: -signal.SIGKILL, 1: -signal.SIGSEGV, 2: -signal.SIGKILL}
    failure = find_failure([], [report(0, 1), report(2, 1)], ObservedExits(1, codes), SHAPE, 10)
    assert (failure.rank, failure.reason) == (1, "ended by SIGSEGV")


def test_ranks_that_all_ended_by_sigabrt_and_wait_for_nothing_are_told_apart_by_what_they_started() -> None:
    """Rank 2 hangs in its data loader; the others are blocked where they read a tensor, and NCCL ended all of them."""
    grid, aborted = MeshShape(pp=2, tp=2), dict.fromkeys(range(4), -signal.SIGABRT)
    counts = [{"tp 0-1/2": 50, "world 0-3/4": 4}, {"tp 0-1/2": 50, "world 0-3/4": 4}]
    counts += [{"tp 2-3/2": 20, "world 0-3/4": 3}, {"tp 2-3/2": 21, "world 0-3/4": 4}]
    states = [
        RankState(rank, "", 0, "training step 3", 600.0, None, found, [], [], ["loop.py:130 in _agree"])
        for rank, found in enumerate(counts)
    ]
    failure = find_failure([], states, ObservedExits(0, aborted), grid, 600.0)
    assert failure.rank == 2
    assert failure.reason == "did not arrive at operation 4 of world 0-3/4 within launch.timeout_s=600"


def test_a_rank_that_ended_otherwise_is_named_before_those_that_nccl_ended_because_of_it() -> None:
    codes = {0: -signal.SIGABRT, 1: -signal.SIGSEGV, 2: -signal.SIGABRT}
    failure = find_failure([], [report(0, 0.5), report(2, 0.5)], ObservedExits(0, codes), SHAPE, 10)
    assert (failure.rank, failure.reason) == (1, "ended by SIGSEGV")


def test_a_rank_that_others_found_lost_is_described_by_its_exit_if_that_is_known() -> None:
    lost = replace(record(0, echo=True), message="rank 1 ended or no longer responds", blames=(1,))
    for code, reason in ((-signal.SIGKILL, "ended by SIGKILL"), (-signal.SIGTERM, lost.message), (None, lost.message)):
        codes = {0: 1} if code is None else {0: 1, 1: code}
        assert find_failure([lost], [], ObservedExits(0, codes), SHAPE, 10).reason == reason
    killed = ObservedExits(0, {0: 1, 1: -signal.SIGKILL}, stragglers=[1])
    assert find_failure([lost], [], killed, SHAPE, 10).reason == lost.message


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (ConfigError("a"), 1),
        (CheckpointError("a"), 1),
        (cannot_write(Path("x"), OSError(27, "File too large")), 1),
        (LayerError("a"), 3),
        (ValueError("a"), 3),
    ],
)
def test_an_error_that_explains_itself_is_printed_without_its_traceback(error: Exception, lines: int) -> None:
    coordinates, explained = SHAPE.coordinates(1), explains_itself(error)
    found = FailureRecord.of(error, 1, coordinates, step=2, action="training step 3", explained=explained)
    printed = failure_of(replace(found, trace=f"Traceback:\n{error}")).text.splitlines()
    assert len(printed) == lines
    assert printed[-1].startswith("[rank 1 | pp1 dp0 tp0] failed in training step 3: ")


def test_a_configuration_error_rejects_the_configuration_at_any_time() -> None:
    assert rejects_configuration(ConfigError("a"), before_training=False)
    assert rejects_configuration(CheckpointError("a"), before_training=True)
    for error in (CheckpointError("a"), LayerError("a"), ValueError("a")):
        assert not rejects_configuration(error, before_training=False)


@pytest.mark.full
def test_a_layer_that_cannot_be_compiled_is_one_line_and_rejected(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megastack.models.compile.BACKEND", "eager")
    layer = "model.mlp={_target_: tests.models.test_compile.BranchingMLP}"
    assert train(tmp_path, "compile=true", layer, "run.steps=1") == 78
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("compile=true: blocks.0.mlp, a tests.models.test_compile.BranchingMLP, cannot be compiled")
    assert status(tmp_path / "run")["exit_code"] == 78
    assert "Traceback" in next((tmp_path / "run" / "failures").glob("rank_*.json")).read_text()
