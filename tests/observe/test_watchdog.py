"""Missing ranks from the reports of all ranks, and the thread that writes a report."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace

from megastack.comm.flight_recorder import KEPT, FlightRecorder, Operation
from megastack.comm.observer import ObservedWork, RankObserver
from megastack.mesh.shape import Axis
from megastack.observe.watchdog import RankState, Watchdog, find_missing_ranks, read_reports

HERE = {Axis.PP: 1, Axis.DP: 0, Axis.CP: 0, Axis.TP: 0}


def report(rank: int, waiting: Operation | None, counts: dict[str, int], seconds: float = 5.0) -> RankState:
    return RankState(rank, f"pp{rank} dp0 tp0", 0, "training step 3", seconds, waiting, counts, [], [], ["a.py:7 in f"])


def receive(number: int, source: int, destination: int) -> Operation:
    return Operation("pp", "receive", number, (2, 4), (source, destination))


def test_the_rank_at_the_end_of_a_chain_of_waits_is_named() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is stopped and wrote no report."""
    waits = [report(0, receive(5, 1, 0), {}), report(1, receive(4, 2, 1), {"pp send 1>0": 4}, 6.0)]
    missing = find_missing_ranks(waits, 3)
    assert missing is not None
    assert (missing.rank, missing.operation, missing.waited_s) == (2, "pp send 4 of [2, 4] to rank 1", 6.0)
    assert missing.lines == (
        "[rank 0 | pp0 dp0 tp0] waits for pp receive 5 of [2, 4] from rank 1 in training step 3",
        "[rank 1 | pp1 dp0 tp0] waits for pp receive 4 of [2, 4] from rank 2 in training step 3",
    )


def test_a_rank_that_hangs_outside_an_operation_reports_its_stack() -> None:
    """Two ranks wait in a collective, the third is behind and runs its own code."""
    reduction = Operation("tp", "all_reduce", 7, (8,), (0, 1, 2))
    counts = {reduction.channel: 7}
    found = [report(0, reduction, counts), report(1, None, {reduction.channel: 6}, 9.0), report(2, reduction, counts)]
    missing = find_missing_ranks(found, 3)
    assert missing is not None and (missing.rank, missing.operation) == (1, "tp all_reduce 7 of [8]")
    assert missing.lines[-1] == "[rank 1 | pp1 dp0 tp0] issued no operation for 9 s in training step 3, at a.py:7 in f"


def test_no_rank_is_missing_if_all_arrived_or_wait_in_a_cycle() -> None:
    reduction = Operation("tp", "all_reduce", 7, (8,), (0, 1))
    assert find_missing_ranks([report(rank, reduction, {reduction.channel: 7}) for rank in (0, 1)], 2) is None
    assert find_missing_ranks([report(0, receive(1, 1, 0), {}), report(1, receive(1, 0, 1), {})], 2) is None
    assert find_missing_ranks([], 2) is None


def test_operations_are_numbered_by_group_and_line_and_only_the_latest_are_kept() -> None:
    flight_recorder = FlightRecorder()
    for _ in range(KEPT):
        flight_recorder.start("tp", "all_reduce", (1,), (0, 1))
    flight_recorder.start("tp", "all_gather", (1,), (0, 1))
    flight_recorder.start("tp", "all_gather", (1,), (0, 2))
    flight_recorder.start("pp", "send", (1,), (0, 1))
    last = flight_recorder.start("pp", "receive", (1,), (1, 0))
    assert len(flight_recorder.operations) == KEPT and flight_recorder.operations[-1] is last
    assert flight_recorder.counts() == {
        "tp 0-1/2": KEPT + 1, "tp 0-2/2": 1, "pp send 0>1": 1, "pp receive 1>0": 1
    }  # fmt: skip
    assert last.channel == "pp receive 1>0" and last.other.channel == "pp send 1>0"


def test_the_thread_reports_a_hang_and_the_report_stays_valid(tmp_path) -> None:
    flight_recorder, path = FlightRecorder(), tmp_path / "watch" / "rank_00001.json"
    operation = flight_recorder.start("dp", "all_reduce", (3,), (0, 1))
    flight_recorder.begin_wait(operation)
    others_failed = threading.Event()
    watches = {"limit_s": 0.3, "doing": lambda: "training step 3", "failed": others_failed.is_set}
    with Watchdog(flight_recorder, path, 1, HERE, **watches) as watchdog:
        for _ in range(4):
            time.sleep(0.1)
            flight_recorder.act("1F0")  # it makes progress
        assert not path.exists()
        deadline = time.monotonic() + 20
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (found,) = read_reports(path.parent)
        others_failed.set()
        flight_recorder.end_wait()
        watchdog.write()
    assert (found.waiting, found.doing, found.label) == (operation, "training step 3", "[rank 1 | pp1 dp0 tp0]")
    assert found.seconds >= 0.25 and found.actions == ["1F0"] * 4 and "test_watchdog.py" in found.stack[-1]
    assert json.loads(path.read_text())["waiting"] is not None


def test_only_a_rank_that_fails_leaves_a_report(tmp_path) -> None:
    path = tmp_path / "rank_00000.json"
    with Watchdog(FlightRecorder(), path, 0, HERE, limit_s=60, doing=lambda: "starting"):
        pass
    assert not path.exists()
    try:
        with Watchdog(FlightRecorder(), path, 0, HERE, limit_s=60, doing=lambda: "starting"):
            raise ValueError
    except ValueError:
        pass
    assert read_reports(tmp_path)[0].doing == "starting"


def test_a_rank_that_continues_removes_its_report_and_writes_another_when_others_fail(tmp_path) -> None:
    flight_recorder, path, others_failed = FlightRecorder(), tmp_path / "rank_00001.json", threading.Event()
    watches = {"limit_s": 1.0, "doing": lambda: "training step 3", "failed": others_failed.is_set}
    with Watchdog(flight_recorder, path, 1, HERE, **watches):
        wait_until(path.exists)
        operation = flight_recorder.start("dp", "all_reduce", (3,), (0, 1))
        wait_until(lambda: not path.exists())
        others_failed.set()
        wait_until(path.exists)
        assert read_reports(tmp_path)[0].last == operation
        flight_recorder.begin_wait(flight_recorder.start("dp", "all_reduce", (3,), (0, 1)))
        time.sleep(0.3)
    assert read_reports(tmp_path)[0].last == operation, "what it did after the failure is not reported"


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_if_no_rank_waits_on_the_host_the_latest_operations_show_the_missing_rank() -> None:
    """As with NCCL: ranks 0 and 2 have started operation 7, rank 1 has not, and none of them waits."""
    line = Operation("dp", "all_reduce", 7, (8,), (0, 1, 2))
    reports = [
        replace(report(rank, None, {line.channel: number}), last=line._replace(number=number))
        for rank, number in ((0, 7), (1, 6), (2, 7))
    ]
    missing = find_missing_ranks(reports, 3)
    assert missing is not None and (missing.rank, missing.operation) == (1, "dp all_reduce 7 of [8]")


def test_the_time_of_a_wait_counts_from_the_start_of_a_collective() -> None:
    observer, work = RankObserver(), type("Work", (), {"wait": lambda self: None})()
    flight_recorder = observer.flight_recorder
    pending = ObservedWork(work, observer, observer.on_operation("dp", "all_reduce", (0, 1), (3,), None))
    time.sleep(0.05)
    pending.wait()
    assert flight_recorder.moved - flight_recorder.since >= 0.05


def test_local_work_within_an_operation_does_not_count_as_arrival() -> None:
    """A checkpoint is one operation of several rounds: the others wait for the rank that writes longest."""
    flight_recorder = FlightRecorder()
    operation = flight_recorder.start("world", "checkpoint_save", (), (0, 1))
    with flight_recorder.waits(operation):
        with flight_recorder.local_work():
            assert flight_recorder.waiting is None and flight_recorder.counts()[operation.channel] == 0
        assert flight_recorder.waiting == operation and flight_recorder.counts()[operation.channel] == 1
    with flight_recorder.local_work():
        assert flight_recorder.waiting is None and flight_recorder.counts()[operation.channel] == 1


def test_messages_show_the_rank_that_started_fewer() -> None:
    counts = [{"pp send 0>1": 5}, {"pp receive 0>1": 5, "pp send 1>2": 4}, {"world 0-2/3": 1}]
    missing = find_missing_ranks([report(rank, None, found) for rank, found in enumerate(counts)], 3)
    assert missing is not None and (missing.rank, missing.operation) == (2, "operation 1 of pp 1>2")
    assert find_missing_ranks([report(rank, None, {"dp 0-1/2": 3}) for rank in range(2)], 2) is None


def test_the_first_operation_that_a_rank_did_not_reach_is_named_whoever_waits_for_a_later_one() -> None:
    """Hosts that run ahead of their devices, and sources of broadcasts, wait for different operations."""
    numbers = {0: 9, 1: 7, 2: 8}
    waits = [
        report(rank, Operation("dp", "broadcast", number, (), (0, 1, 2, 3)), {"dp 0-3/4": number})
        for rank, number in numbers.items()
    ]
    missing = find_missing_ranks([*waits, report(3, None, {"dp 0-3/4": 6})], 4)
    assert missing is not None and (missing.rank, missing.operation) == (3, "dp broadcast 7")


class _Stuck:
    """A device whose stream reaches none of its events, each of which this object stands for."""

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: object) -> float:
        raise AssertionError

    def record(self) -> _Stuck:
        return self

    def release(self, event: object) -> None:
        raise AssertionError

    def is_compute_stream(self) -> bool:
        return True


def test_a_rank_whose_device_is_blocked_is_ended_even_if_its_host_continues(tmp_path) -> None:
    flight_recorder, ended = FlightRecorder(), list[RankState]()
    operation = flight_recorder.start("dp", "all_reduce", (3,), (0, 1))
    flight_recorder.use_device(_Stuck())
    flight_recorder.begin_stream_wait(operation)
    flight_recorder.end_stream_wait()
    path = tmp_path / "rank_00000.json"
    with Watchdog(flight_recorder, path, 0, HERE, limit_s=0.3, doing=lambda: "step", end=ended.append) as watchdog:
        watchdog.ends_rank = True
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            flight_recorder.act("1F0")
            time.sleep(0.01)
        watchdog.ends_rank = False
    assert ended[0].waiting == operation and read_reports(tmp_path)[0].waiting == operation


def test_a_blocked_rank_is_ended_as_soon_as_another_one_has_failed_and_a_busy_rank_is_not(tmp_path) -> None:
    for blocked in (True, False):
        flight_recorder, ended = FlightRecorder(), list[RankState]()
        operation = flight_recorder.start("dp", "all_reduce", (3,), (0, 1))
        flight_recorder.begin_wait(operation)
        if not blocked:
            flight_recorder.end_wait()
        path = tmp_path / f"rank_0000{int(blocked)}.json"
        watches = {"limit_s": 2.0, "doing": lambda: "step", "failed": lambda: True, "end": ended.append}
        with Watchdog(flight_recorder, path, 0, HERE, **watches) as watchdog:
            watchdog.ends_rank = True
            wait_until(path.exists)
            time.sleep(0.05)
            watchdog.ends_rank = False
        assert bool(ended) is blocked
