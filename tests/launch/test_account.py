"""Which failure is named, from what ranks and launcher know."""

from __future__ import annotations

import signal

from megastack.comm.trail import Operation
from megastack.launch.account import Seen, account_of
from megastack.mesh.shape import MeshShape
from megastack.observe.failure import FailureRecord
from megastack.observe.watchdog import Report

SHAPE = MeshShape(pp=3)
WAIT = Operation("pp", "all_reduce", 4, (5,), (0, 1, 2))


def record(rank: int, *, echo: bool) -> FailureRecord:
    return FailureRecord(rank, f"pp{rank} dp0 tp0", rank, 2, "training step 3", "E: m", "trace", "m", echo)


def report(rank: int, seconds: float) -> Report:
    return Report(rank, f"pp{rank} dp0 tp0", 0, "training step 3", seconds, WAIT, {WAIT.line: 4}, [], [], [])


def test_a_rank_that_failed_by_itself_comes_first() -> None:
    account = account_of([record(1, echo=False), record(0, echo=True)], [report(0, 9)], Seen(0, {0: 1}), SHAPE, 10)
    assert (account.rank, account.reason, account.step) == (1, "E: m", 2)
    assert account.text.splitlines()[-1] == "[rank 1 | pp1 dp0 tp0] failed in training step 3: E: m"


def test_a_rank_that_died_is_named_by_its_signal_and_who_waits_is_told() -> None:
    echoes = [record(0, echo=True), record(2, echo=True)]
    account = account_of(echoes, [report(0, 1), report(2, 1)], Seen(0, {0: 1, 1: -signal.SIGKILL}), SHAPE, 10)
    assert (account.rank, account.reason) == (1, "ended by SIGKILL")
    assert account.text.count("waits for pp all_reduce 4 of [5]") == 2


def test_a_rank_that_stopped_calling_is_told_from_one_that_died_by_how_long_others_waited() -> None:
    echoes, reports = [record(0, echo=True), record(2, echo=True)], [report(0, 10), report(2, 9.9)]
    account = account_of(echoes, reports, Seen(0, {0: 1}), SHAPE, 10)
    assert (account.rank, account.coordinates) == (1, "pp1 dp0 tp0")
    assert account.reason == "did not arrive at pp all_reduce 4 of [5] within launch.timeout_s=10"
    assert account.text.endswith(f"[rank 1 | pp1 dp0 tp0] {account.reason}")


def test_without_reports_a_rank_without_a_word_is_named_else_the_first_echo() -> None:
    account = account_of([record(0, echo=True), record(2, echo=True)], [], Seen(0, {0: 1}), SHAPE, 10)
    assert account.rank == 1 and account.reason.startswith("ended without a traceback")
    killed = account_of([], [], Seen(0, {0: -9}, "received SIGTERM and did not stop"), SHAPE, 10)
    assert killed.reason == "received SIGTERM and did not stop"
    assert account_of([record(rank, echo=True) for rank in (2, 0, 1)], [], Seen(0, {0: 1}), SHAPE, 10).rank == 2
