"""What an observer sees of collectives and messages."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from megastack.comm.collectives import all_reduce, broadcast
from megastack.comm.flight_recorder import Operation
from megastack.comm.group import AxisGroup
from megastack.comm.objects import all_gather_objects
from megastack.comm.observer import NO_OBSERVER, ObservedWork, RankObserver
from megastack.comm.p2p import P2PChannels
from megastack.comm.traffic import Traffic
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks
from scripts.bench_recorder import bare, microseconds
from scripts.bench_recorder import observed as observed_call


class Calls(RankObserver):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.begin_wait = lambda operation, since=None: self.calls.append(("wait", operation.op, since is not None))
        self.end_wait = lambda: self.calls.append("end")

    def on_operation(self, *values: Any) -> Operation:
        self.calls.append(values)
        return super().on_operation(*values)


def observed() -> tuple[list[Any], list[Any], list[Any]]:
    mesh = Mesh.from_environment(MeshShape(pp=2), device="cpu", observer=(observer := Calls()))
    group, x = mesh[Axis.PP], torch.ones(2, 3)
    parts = []
    for operation in (
        lambda: all_reduce(x, group),
        lambda: (broadcast(x, group), all_gather_objects(1, group)),
        lambda: exchange(P2PChannels(group, mesh.backward_channels, mesh.device), x, group.rank),
    ):
        operation()
        parts.append(list(observer.calls))
        observer.calls.clear()
    return parts[0], parts[1], parts[2]


def exchange(channels: P2PChannels, x: torch.Tensor, rank: int) -> None:
    if rank == 0:
        channels.send([x], 1)
        channels.finish()
    else:
        channels.receive(x.shape, x.dtype, 0).wait()


def test_operations_are_reported_with_their_waits_and_counted_once() -> None:
    ranks = (0, 1)
    for rank, (reduction, blocking, message) in enumerate(run_ranks(observed, 2)):
        assert reduction == [("pp", "all_reduce", ranks, (2, 3), 24), ("wait", "all_reduce", True), "end"]
        assert blocking == [
            ("pp", "broadcast", ranks, (), None if rank else 24),
            ("wait", "broadcast", False),
            "end",
            ("pp", "all_gather_object", ranks, (), None),
            ("wait", "all_gather_object", False),
            "end",
        ]
        assert message[0] == (("pp", "receive", ranks, (2, 3), None) if rank else ("pp", "send", ranks, (2, 3), 24))


def test_a_rank_observer_counts_and_records() -> None:
    observer = RankObserver()
    operation = observer.on_operation("tp", "all_gather", (2, 3), (4,), 16)
    assert observer.ledger.records() == {("tp", "all_gather"): Traffic(1, 16, 8)}
    assert list(observer.flight_recorder.operations) == [operation]
    observer.begin_wait(operation)
    assert observer.flight_recorder.waiting is operation
    observer.end_wait()
    observer.on_layer("blocks.1")
    assert (observer.flight_recorder.waiting, observer.flight_recorder.layer) == (None, "blocks.1")
    observer.on_action("0F0")
    assert (list(observer.flight_recorder.actions), observer.flight_recorder.layer) == (["0F0"], None)
    assert observer.on_operation("tp", "receive", (2, 3), (4,), None).op == "receive"
    assert observer.ledger.total().calls == 1, "an operation without bytes is not counted"


class Event:
    """A point in a stream, which the device reaches when the test says so."""

    reached_ms: float | None = None

    def query(self) -> bool:
        return self.reached_ms is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.reached_ms is not None and end.reached_ms is not None, "the host would block"
        return end.reached_ms - self.reached_ms


class Events:
    """A device whose events are recorded in one of its streams."""

    def __init__(self) -> None:
        self.recorded: list[Event] = []
        self.released: list[Event] = []
        self.computes = True

    def record(self) -> Event:
        self.recorded.append(Event())
        return self.recorded[-1]

    def release(self, event: Event) -> None:
        self.released.append(event)

    def is_compute_stream(self) -> bool:
        return self.computes


def wait(observer: RankObserver, axis: str = "tp") -> Operation:
    operation = observer.on_operation(axis, "all_reduce", (0, 1), (1,), 4)
    observer.begin_wait(operation)
    observer.end_wait()
    return operation


def test_where_a_wait_does_not_block_the_host_the_oldest_wait_that_the_stream_has_not_passed_counts() -> None:
    observer, events = RankObserver(), Events()
    observer.use_device(events)
    recorder = observer.flight_recorder
    first, second = wait(observer), wait(observer)
    before_first, after_first, before_second, after_second = events.recorded
    assert recorder.waiting is None and recorder.awaited()[0] is first
    before_first.reached_ms, after_first.reached_ms = 0.0, 5.0
    assert recorder.awaited()[0] is second
    before_second.reached_ms, after_second.reached_ms = 5.0, 7.5
    assert recorder.awaited()[0] is None
    third = observer.on_operation("tp", "all_reduce", (0, 1), (1,), 4)
    observer.begin_wait(third)
    assert recorder.awaited()[0] is third
    observer.end_wait()
    events.recorded[-2].reached_ms = events.recorded[-1].reached_ms = 9.0
    assert recorder.awaited()[0] is None


def test_the_time_that_a_stream_waits_is_counted_in_the_step_that_waits() -> None:
    """The device passes the waits of a step while the host issues the next one; nothing blocks the host."""
    observer, events = RankObserver(), Events()
    observer.use_device(events)
    wait(observer), wait(observer, "dp"), wait(observer)
    step = observer.ledger.copy()
    assert step.exposed_s == {}
    observer.ledger.reset()
    wait(observer)
    for event, at in zip(events.recorded, (0.0, 2.0, 2.0, 2.0, 3.0, 7.0), strict=False):
        event.reached_ms = at
    observer.flight_recorder.settle()
    assert step.exposed_s == {"tp": 0.006, "dp": 0.0} and observer.exposed_s == {}
    assert events.released == events.recorded[:6], "each event can be used again"
    events.computes = False
    wait(observer, "dp")
    for event in events.recorded[6:]:
        event.reached_ms = 100.0
    observer.flight_recorder.settle()
    assert observer.exposed_s == {"tp": 0.0}, "another stream than that of the computation waited"


def test_a_call_that_starts_an_operation_and_does_not_return_is_a_wait() -> None:
    """NCCL connects two ranks in their first message."""
    observer = RankObserver()
    operation = observer.on_operation("pp", "send", (0, 1), (1,), 4)
    assert observer.flight_recorder.awaited()[0] is operation
    ObservedWork(None, observer, operation)
    assert observer.flight_recorder.awaited()[0] is None


def test_the_time_of_waits_is_counted_by_axis_until_the_ledger_is_reset() -> None:
    observer, work = RankObserver(), type("Work", (), {"wait": lambda self: time.sleep(0.02)})()
    for axis in ("tp", "tp", "dp"):
        ObservedWork(work, observer, observer.on_operation(axis, "all_reduce", (0, 1), (1,), 4)).wait()
    exposed = observer.exposed_s
    assert exposed is not None and set(exposed) == {"tp", "dp"}
    assert 0.02 <= exposed["dp"] <= exposed["tp"] - 0.01
    observer.ledger.reset()
    assert observer.exposed_s == {} and observer.ledger.records() == {}
    assert observer.flight_recorder.counts() == {"tp 0-1/2": 2, "dp 0-1/2": 1}, "never reset"


def test_recording_costs_about_twice_a_bare_recorder() -> None:
    """The script prints the figure; the limit leaves room for a busy machine."""
    ratios = (microseconds(observed_call()) / microseconds(bare()) for _ in range(5))
    assert any(ratio < 3 for ratio in ratios)


def unobserved() -> float:
    """A group without an observer works."""
    Mesh.from_environment(MeshShape(tp=2), device="cpu")
    group = AxisGroup(dist.get_rank(), 2, (0, 1), dist.group.WORLD, "tp")
    assert group.observer is NO_OBSERVER
    return float(all_reduce(torch.ones(()), group)) + len(all_gather_objects(1, group))


def test_a_bare_group_communicates_without_an_observer() -> None:
    assert run_ranks(unobserved, 2) == [4.0, 4.0]


def test_a_wait_that_fails_is_not_ended() -> None:
    def fail(self: object) -> None:
        raise RuntimeError

    observer, work = RankObserver(), type("Work", (), {"wait": fail})()
    operation = observer.on_operation("dp", "all_reduce", (0, 1), (1,), 4)
    try:
        ObservedWork(work, observer, operation).wait()
    except RuntimeError:
        assert observer.flight_recorder.waiting is operation
