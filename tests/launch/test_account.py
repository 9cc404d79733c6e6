"""Which failure is named, from what ranks and launcher know."""

from __future__ import annotations

import signal
from dataclasses import replace

from megastack.comm.flight_recorder import Operation
from megastack.launch.account import Seen, account_of
from megastack.mesh.shape import MeshShape
from megastack.observe.failure import FailureRecord
from megastack.observe.watchdog import RankState

SHAPE = MeshShape(pp=3)
WAIT = Operation("pp", "all_reduce", 4, (5,), (0, 1, 2))


def record(rank: int, *, echo: bool) -> FailureRecord:
    return FailureRecord(rank, f"pp{rank} dp0 tp0", rank, 2, "training step 3", "E: m", "trace", "m", echo)


def report(rank: int, seconds: float, waiting: Operation | None = WAIT, number: int = 4) -> RankState:
    counts = {WAIT.channel: number}
    return RankState(rank, f"pp{rank} dp0 tp0", 0, "training step 3", seconds, waiting, counts, [], [], [], WAIT)


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


def test_the_rank_that_others_waited_for_is_named_whatever_it_reports_when_it_comes() -> None:
    """Rank 1 slept, woke up and found the connection closed: all three have a record, and its own is the first."""
    records = [record(rank, echo=True) for rank in (1, 0, 2)]
    reports = [report(0, 3), report(1, 3, None, number=3), report(2, 1)]
    account = account_of(records, reports, Seen(1, {1: 1}), SHAPE, 3)
    assert (account.rank, account.reason) == (1, "did not arrive at pp all_reduce 4 of [5] within launch.timeout_s=3")


def test_the_last_to_arrive_is_named_where_it_wrote_its_report_after_the_others_gave_up() -> None:
    now = 1_000_000_000_000
    reports = [replace(report(rank, seconds), time_ns=now) for rank, seconds in ((0, 3.1), (1, 0.1), (2, 3.0))]
    account = account_of([record(rank, echo=True) for rank in (0, 1, 2)], reports, Seen(0, {0: 1}), SHAPE, 3)
    assert (account.rank, account.text.count("waits for pp all_reduce 4 of [5]")) == (1, 2)
    together = [replace(found, seconds=3.0) for found in reports]
    assert account_of([record(2, echo=True)], together, Seen(2, {2: 1}), SHAPE, 3).rank == 0, (
        "the first without a record"
    )


def test_operations_that_no_report_knows_leave_the_rank_that_outlasted_the_time_out() -> None:
    """Collectives of a user's layer: the time-out is seen, and who did not end is."""
    echoes, idle = [record(0, echo=True), record(2, echo=True)], [report(rank, 3, None) for rank in range(3)]
    seen = Seen(0, {0: 1, 1: -signal.SIGKILL}, outlasted={1})
    account = account_of(echoes, idle, seen, SHAPE, 3)
    assert (account.rank, account.reason) == (1, "did not end within launch.grace_s, and was killed")
    assert account.text.startswith("[rank 1 | pp1 dp0 tp0] issued no operation for 3 s in training step 3\n")
    early = [report(rank, 1, None) for rank in range(3)]
    assert account_of(echoes, early, seen, SHAPE, 3).rank == 0, "a rank that waits outlasts the failure as well"


def test_ranks_that_nccl_aborted_are_victims_of_a_time_out() -> None:
    aborted = {0: -signal.SIGABRT, 2: -signal.SIGABRT}
    waits = [report(0, 3, None), report(1, 3, None, number=3), report(2, 3, None)]
    slept = account_of([], waits, Seen(0, aborted, outlasted={1}), SHAPE, 3)
    assert (slept.rank, slept.reason) == (1, "did not arrive at pp all_reduce 4 of [5] within launch.timeout_s=3")
    unknown = [report(rank, 3, None) for rank in range(3)]
    assert account_of([], unknown, Seen(0, aborted | {1: -signal.SIGKILL}), SHAPE, 3).rank == 1
    crashed = account_of([], [report(0, 0.5, None)], Seen(2, {2: -signal.SIGABRT, 0: -9, 1: -9}), SHAPE, 3)
    assert (crashed.rank, crashed.reason) == (2, "ended by SIGABRT")


def test_a_rank_that_died_is_preferred_to_ranks_that_were_killed_for_it() -> None:
    codes = {0: -signal.SIGKILL, 1: -signal.SIGSEGV, 2: -signal.SIGKILL}
    account = account_of([], [report(0, 1), report(2, 1)], Seen(1, codes), SHAPE, 10)
    assert (account.rank, account.reason) == (1, "ended by SIGSEGV")
