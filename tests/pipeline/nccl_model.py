"""A model of NCCL that runs the pipeline runtime's own operations.

:func:`record` runs the real :class:`Pipeline` of one rank with operations that only record themselves, and
:func:`deadlocks` replays the records of all ranks. In the model, as on a GPU,

- operations of a rank in one communicator run one after another, each when the other side runs its half;
- an operation starts after everything that the rank's stream waited for before it was posted;
- a wait blocks the stream; only headers block the host, which reads them.

A communicator is *lazy*, made for a pair of ranks at its first operation, where the host of each side blocks until the
other is there; or *eager*, made with the process group and shared by all pairs of the group.
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastack.batch import Microbatch, StageLoss
from megastack.comm.group import AxisGroup
from megastack.comm.observer import NO_OBSERVER
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedule import Schedule
from tests.gpu_branches import gpu_branches
from tests.pipeline.chain import batch

_HEADER = json.dumps([{"name": "hidden", "shape": [1], "dtype": "float32", "needs_grad": True}]).encode()
_FORWARDS = json.dumps([{"name": "hidden", "shape": [1], "dtype": "float32", "needs_grad": False}]).encode()


class Event(NamedTuple):
    """One call of the host: ``post`` of an operation, or a ``wait`` for one, by the stream or the host."""

    kind: str
    operation: Operation


@dataclass(eq=False)
class Operation:
    """A send or receive of one rank, and in :func:`deadlocks` its progress."""

    is_send: bool
    peer: int
    group: str
    is_header: bool
    waits_before: int = 0
    done: bool = False


@dataclass
class Record:
    """The calls of one rank, and the most message tensors that it held at once in each step."""

    events: list[Event] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


class _Work:
    """An operation that never completes as seen by the host; waiting for it returns at once."""

    def __init__(self, record: Record, operation: Operation) -> None:
        self._record, self._operation = record, operation

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._record.events.append(Event("wait", self._operation))


class _Scale(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.ones(1)), last

    def forward(self, inputs: Mapping[str, Any], microbatch: Microbatch) -> dict[str, Any] | StageLoss:
        out = self.weight * inputs.get("hidden", 1.0)
        return StageLoss(out.sum(), out.sum().detach()) if self.last else {"hidden": out}


class _LoneMesh:
    """The mesh of one pipeline rank without process groups."""

    device, observer = torch.device("cpu"), NO_OBSERVER

    def __init__(self, rank: int, pp: int, groups: int) -> None:
        self._axis = AxisGroup(rank, pp, tuple(range(pp)), cast(Any, "up"), "pp")
        self.backward_channels = "down" if groups == 2 else "up"

    def __getitem__(self, axes: object) -> AxisGroup:
        return self._axis if axes is Axis.PP else AxisGroup.single("all")


def record(
    schedule: Schedule, rank: int, *, steps: int = 1, forwards: bool = False, groups: int = 2, receive_lead: int = 0
) -> Record:
    """Run steps of a rank's real pipeline, or with ``forwards`` evaluations, and record its calls."""
    found = Record()
    held: weakref.WeakSet[Tensor] = weakref.WeakSet()
    header = _FORWARDS if forwards else _HEADER

    def post(x: Tensor, peer: int, group: str, is_send: bool) -> _Work:
        operation = Operation(is_send, peer, group, is_header=x.dtype in (torch.int64, torch.uint8))
        found.events.append(Event("post", operation))
        if operation.is_header and not is_send:
            x.copy_(torch.tensor([len(header)] if x.dtype == torch.int64 else list(header)))
        if not operation.is_header:
            held.add(x)
            found.peaks[-1] = max(found.peaks[-1], len(held))
        return _Work(found, operation)

    with (
        gpu_branches(receive_lead=receive_lead),
        mock.patch.object(dist, "isend", lambda x, dst, group: post(x, dst, group, True)),
        mock.patch.object(dist, "irecv", lambda x, src, group: post(x, src, group, False)),
    ):
        own = schedule.rank_stages(rank)
        mesh = cast(Mesh, _LoneMesh(rank, schedule.pp, groups))
        pipeline = Pipeline([_Scale(stage == schedule.stages - 1) for stage in own], schedule, mesh)
        microbatches = [batch(1, 1)] * schedule.microbatches
        for _ in range(steps):
            found.peaks.append(0)
            _ = pipeline.evaluate(microbatches) if forwards else pipeline.run(microbatches, 1)
    return found


def deadlocks(records: Sequence[Record], *, eager: bool = False) -> bool:
    """Whether the ranks stop before all their operations are done."""
    ranks = [_Rank(number, found.events, eager) for number, found in enumerate(records)]
    while any(rank.advance(ranks) for rank in ranks):
        pass
    return not all(rank.is_finished for rank in ranks)


class _Rank:
    """The state of one rank in the model."""

    def __init__(self, number: int, events: Sequence[Event], eager: bool) -> None:
        self.number = number
        self.eager = eager
        self.events = deque(Event(event.kind, event.operation) for event in events)
        self.stream: list[Operation] = []
        self.waited = 0
        self.queues: dict[tuple[object, ...], deque[Operation]] = defaultdict(deque)
        self.connecting: set[tuple[object, ...]] = set()

    @property
    def is_finished(self) -> bool:
        return not self.events and self.waited == len(self.stream) and not any(self.queues.values())

    def communicator(self, operation: Operation) -> tuple[object, ...]:
        return (operation.group, *(() if self.eager else sorted((self.number, operation.peer))))

    def ready(self, operation: Operation) -> bool:
        queue = self.queues[self.communicator(operation)]
        return bool(queue) and queue[0] is operation and operation.waits_before <= self.waited

    def advance(self, ranks: Sequence[_Rank]) -> bool:
        """Run transport, stream and host as far as they get; whether anything changed."""
        before = self._state()
        while self._run_operation(ranks) or self._run_stream() or self._run_host(ranks):
            pass
        return self._state() != before

    def _state(self) -> tuple[int, ...]:
        queued = sum(map(len, self.queues.values()))
        return len(self.events), self.waited, queued, len(self.stream), len(self.connecting)

    def _run_operation(self, ranks: Sequence[_Rank]) -> bool:
        for key, queue in self.queues.items():
            if not queue or not self.ready(queue[0]):
                continue
            own, peer = queue[0], ranks[queue[0].peer]
            other = next(iter(peer.queues[key]), None)
            if other is None or other.peer != self.number or other.is_send == own.is_send or not peer.ready(other):
                continue
            own.done = other.done = True
            queue.popleft()
            peer.queues[key].popleft()
            return True
        return False

    def _run_stream(self) -> bool:
        if self.waited < len(self.stream) and self.stream[self.waited].done:
            self.waited += 1
            return True
        return False

    def _run_host(self, ranks: Sequence[_Rank]) -> bool:
        if not self.events:
            return False
        kind, operation = self.events[0]
        if kind == "wait":
            if operation.is_header and not operation.is_send and not operation.done:
                return False
            self.stream.append(operation)
        else:
            key = self.communicator(operation)
            self.connecting.add(key)
            if not self.eager and key not in ranks[operation.peer].connecting:
                return False
            operation.waits_before = len(self.stream)
            self.queues[key].append(operation)
        self.events.popleft()
        return True
