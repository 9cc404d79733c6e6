"""What an observer sees of collectives and messages."""

from __future__ import annotations

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
