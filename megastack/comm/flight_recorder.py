"""Flight recorder of one rank: the operations it issued most recently and the one it is blocked on.

Counters measure traffic; the recorder lets a hung rank report what it is waiting for, and on which peer. Operations are
numbered from 1 in the order in which this rank starts them, collectives by group and messages by channel (source to
destination), so the same number on two ranks identifies the same operation. The recorder is never reset.

With gloo, a rank is blocked on the operation that it waits for. With NCCL, a wait only makes the current stream wait,
and the host continues; later the host blocks in an unrelated call that reads a tensor. The recorder therefore keeps an
event before and after each such wait (:class:`StreamWaits`). The rank is blocked on the oldest wait that its stream has
not passed, and the time between the two events is the time for which the wait stopped the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple, Protocol

from megastack.comm.traffic import Ledger

KEPT = 32
"""The number of operations, and of actions, that are kept."""
MESSAGES = {"send": "receive", "receive": "send"}
"""Operations between two ranks, and the operation of the peer."""


class Operation(NamedTuple):
    """One collective or message; ``ranks`` are the global ranks that take part, (source, destination) for a message."""

    axis: str
    op: str
    number: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def channel(self) -> str:
        """The name of the sequence that :attr:`number` counts: a group, or a channel between two ranks."""
        return channel_of(self.axis, self.op, self.ranks)

    @property
    def other(self) -> Operation:
        """The same operation as its peers see it."""
        return self._replace(op=MESSAGES.get(self.op, self.op))

    def __str__(self) -> str:
        text = f"{self.axis} {self.op} {self.number}"
        if self.shape:
            text += f" of {list(self.shape)}"
        if self.op not in MESSAGES:
            return text
        return f"{text} {'to' if self.op == 'send' else 'from'} rank {self.ranks[self.op == 'send']}"


def channel_of(axis: str, op: str, ranks: tuple[int, ...]) -> str:
    """The name of a group or channel, the same on every rank."""
    if op in MESSAGES:
        return f"{axis} {op} {ranks[0]}>{ranks[1]}"
    return f"{axis} {ranks[0]}-{ranks[-1]}/{len(ranks)}"


class OperationSequence:
    """The number of operations started on a group or channel."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


_new = tuple.__new__
"""Creates a named tuple from its fields, in half the time of its own constructor."""


class DeviceEvent(Protocol):
    """A point in the work of a device, such as a recorded ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has reached it; callable from any thread."""

    def elapsed_time(self, end: Any) -> float:
        """The milliseconds from this event to a later one; both have been reached."""


class DeviceEvents(Protocol):
    """Records events in the current stream of a device."""

    def record(self) -> DeviceEvent:
        """Record an event after all work issued to the current stream so far."""

    def release(self, event: DeviceEvent) -> None:
        """Called with an event that is no longer needed."""

    def is_compute_stream(self) -> bool:
        """Whether the current stream is the one on which the rank computes."""


class _StreamWait(NamedTuple):
    """A wait that did not block the host; ``since`` is when the host issued it."""

    operation: Operation
    since: float
    began: DeviceEvent
    passed: DeviceEvent
    waited_s: dict[str, float] | None


class StreamWaits:
    """The waits of the streams of one rank that the device has not passed, oldest first.

    Args:
        events: records events on the device.
    """

    def __init__(self, events: DeviceEvents) -> None:
        self._events = events
        self._began: DeviceEvent | None = None
        self._waits: deque[_StreamWait] = deque()

    def begin(self) -> None:
        """Record an event before a wait."""
        self._began = self._events.record()

    def end(self, operation: Operation | None, since: float, waited_s: dict[str, float]) -> None:
        """Record an event after a wait; its time is added to ``waited_s`` once it is known.

        A wait of another stream than the one of the computation delays nothing by itself, and is not counted.
        """
        began, self._began = self._began, None
        if operation is not None and began is not None:
            counted = waited_s if self._events.is_compute_stream() else None
            self._waits.append(_StreamWait(operation, since, began, self._events.record(), counted))
        self.settle()

    def settle(self) -> None:
        """Count the time of the waits that the device has passed, and release their events. Does not block."""
        while self._waits and self._waits[0].passed.query():
            wait = self._waits.popleft()
            if wait.waited_s is not None:
                wait.waited_s[wait.operation.axis] += wait.began.elapsed_time(wait.passed) / 1e3
            self._events.release(wait.began)
            self._events.release(wait.passed)

    def oldest(self) -> tuple[Operation, float] | None:
        """The oldest wait that the device has not passed, and since when; callable from any thread."""
        for wait in list(self._waits):
            if not wait.passed.query():
                return wait.operation, wait.since
        return None


class FlightRecorder:
    """The last operations and actions of one rank.

    Args:
        ledger: the counters to which the recorder adds the time of waits.

    Attributes:
        layer: the layer being computed, if it is known.
        starting: the operation whose starting call has not returned; NCCL connects to its peers in such a call.
        waiting: the operation that the host is blocked on; it stays set after a wait that failed.
        since: when (``time.monotonic``) the transport began to wait for it.
        moved: when this rank last started an operation, began to wait or finished waiting.
        operations: the last operations, the newest last.
        actions: the last actions of the pipeline, the newest last.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = Ledger() if ledger is None else ledger
        self.layer: str | None = None
        self.starting: Operation | None = None
        self.waiting: Operation | None = None
        self.since = self.moved = monotonic()
        self.operations: deque[Operation] = deque(maxlen=KEPT)
        self.actions: deque[object] = deque(maxlen=KEPT)
        self._sequences: dict[str, OperationSequence] = {}
        self._stream_waits: StreamWaits | None = None

    def sequence(self, axis: str, op: str, ranks: tuple[int, ...]) -> OperationSequence:
        """The sequence that numbers an operation of these ranks."""
        key = channel_of(axis, op, ranks)
        if key not in self._sequences:
            self._sequences[key] = OperationSequence()
        return self._sequences[key]

    def start(
        self,
        axis: str,
        op: str,
        shape: tuple[int, ...],
        ranks: tuple[int, ...],
        sequence: OperationSequence | None = None,
    ) -> Operation:
        """Record that this rank starts an operation; ``sequence`` is the result of :meth:`sequence`, if known."""
        if sequence is None:
            sequence = self.sequence(axis, op, ranks)
        sequence.number = number = sequence.number + 1
        self.starting = operation = _new(Operation, (axis, op, number, shape, ranks))
        self.operations.append(operation)
        self.moved = monotonic()
        return operation

    def started(self) -> float:
        """Record that the call that starts the operation has returned, and return when it began."""
        self.starting = None
        return self.moved

    def act(self, action: object) -> None:
        """Record that an action of the pipeline begins; its layer is not known yet."""
        self.actions.append(action)
        self.layer = None
        self.moved = monotonic()

    @contextmanager
    def waits(self, operation: Operation) -> Iterator[None]:
        """Context manager in which this rank waits for an operation."""
        self.begin_wait(operation)
        yield
        self.end_wait()

    def begin_wait(self, operation: Operation | None, since: float | None = None) -> None:
        """Record that this rank blocks from now on.

        Args:
            operation: the operation; None records nothing.
            since: when the operation began. The transport counts the time-out of a collective from then, and that of a
                message from the wait.
        """
        self.starting, self.waiting, self.moved = None, operation, (now := monotonic())
        self.since = now if since is None or operation is None or operation.op in MESSAGES else since

    @contextmanager
    def local_work(self) -> Iterator[None]:
        """Context manager for local work inside an operation of several rounds, which this rank joins afterwards.

        Has no effect unless the host is waiting for an operation.
        """
        operation = self.waiting
        if operation is None:
            yield
            return
        sequence = self.sequence(operation.axis, operation.op, operation.ranks)
        sequence.number -= 1
        self.end_wait()
        try:
            yield
        finally:
            sequence.number += 1
            self.begin_wait(operation)

    def end_wait(self) -> None:
        """Record that the operation is complete, and count the time for which it blocked the host."""
        operation, now = self.waiting, monotonic()
        if operation is not None:
            self._ledger.waited_s[operation.axis] += now - self.moved
        self.waiting, self.moved = None, now

    def use_device(self, events: DeviceEvents) -> None:
        """Called before any operation, if a wait makes the current stream of a device wait instead of the host."""
        self._stream_waits = StreamWaits(events)

    def begin_stream_wait(self, operation: Operation | None, since: float | None = None) -> None:
        """Like :meth:`begin_wait`, for a wait that does not block the host."""
        self.begin_wait(operation, since)
        if self._stream_waits is not None and operation is not None:
            self._stream_waits.begin()

    def end_stream_wait(self) -> None:
        """Record that a wait returned that did not block the host."""
        if self._stream_waits is not None:
            self._stream_waits.end(self.waiting, self.since, self._ledger.waited_s)
        self.waiting, self.moved = None, monotonic()

    def settle(self) -> None:
        """Count the time of all waits that the device has passed."""
        if self._stream_waits is not None:
            self._stream_waits.settle()

    def awaited(self) -> tuple[Operation | None, float]:
        """The oldest operation that this rank or its device is blocked on, and since when; callable from any thread.

        If there is none, the time is that of the most recent progress of the host.
        """
        oldest = None if self._stream_waits is None else self._stream_waits.oldest()
        if oldest is not None:
            return oldest
        waiting, starting = self.waiting, self.starting
        if waiting is not None:
            return waiting, self.since
        return starting, self.moved

    def counts(self) -> dict[str, int]:
        """The number of operations started, by group or channel."""
        return {channel: sequence.number for channel, sequence in list(self._sequences.items())}
