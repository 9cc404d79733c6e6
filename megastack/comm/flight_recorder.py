"""Flight recorder of one rank: the operations it issued most recently and the one it is blocked on.

Counters measure traffic; the recorder lets a hung rank report what it is waiting for, and on which peer. Operations are
numbered from 1 in the order in which this rank starts them, collectives by group and messages by channel (source to
destination), so the same number on two ranks identifies the same operation. The recorder is never reset.

With gloo, a rank is blocked on the operation that it waits for. With NCCL, a wait only makes the current stream wait,
and the host continues; later the host blocks in an unrelated call that reads a tensor. The recorder therefore keeps a
:class:`Completion` of each such wait. The rank is blocked on the oldest wait that its stream has not passed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple, Protocol

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


class Completion(Protocol):
    """A point in the work of a device, such as a recorded ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the device has reached it; callable from any thread."""


class _StreamWait(NamedTuple):
    """A wait that did not block the host; ``since`` is when the host issued it."""

    operation: Operation
    since: float
    passed: Completion


class FlightRecorder:
    """The last operations and actions of one rank.

    Args:
        waited_s: by axis, the seconds that the host was blocked in waits; this recorder adds to them.

    Attributes:
        layer: the layer being computed, if it is known.
        starting: the operation whose starting call has not returned; NCCL connects to its peers in such a call.
        waiting: the operation that the host is blocked on; it stays set after a wait that failed.
        since: when (``time.monotonic``) the transport began to wait for it.
        moved: when this rank last started an operation, began to wait or finished waiting.
        operations: the last operations, the newest last.
        actions: the last actions of the pipeline, the newest last.
    """

    def __init__(self, waited_s: dict[str, float] | None = None) -> None:
        self._waited_s = defaultdict[str, float](float) if waited_s is None else waited_s
        self.layer: str | None = None
        self.starting: Operation | None = None
        self.waiting: Operation | None = None
        self.since = self.moved = monotonic()
        self.operations: deque[Operation] = deque(maxlen=KEPT)
        self.actions: deque[object] = deque(maxlen=KEPT)
        self._sequences: dict[str, OperationSequence] = {}
        self._stream_waits: deque[_StreamWait] = deque()

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
            self._waited_s[operation.axis] += now - self.moved
        self.waiting, self.moved = None, now

    def end_stream_wait(self, passed: Completion) -> None:
        """Record that a wait returned that did not block the host.

        Args:
            passed: whether the device has passed the wait.
        """
        if self.waiting is not None:
            self._stream_waits.append(_StreamWait(self.waiting, self.since, passed))
        while self._stream_waits and self._stream_waits[0].passed.query():
            self._stream_waits.popleft()
        self.waiting, self.moved = None, monotonic()

    def awaited(self) -> tuple[Operation | None, float]:
        """The oldest operation that this rank or its device is blocked on, and since when; callable from any thread.

        If there is none, the time is that of the most recent progress of the host.
        """
        for wait in list(self._stream_waits):
            if not wait.passed.query():
                return wait.operation, wait.since
        waiting, starting = self.waiting, self.starting
        if waiting is not None:
            return waiting, self.since
        return starting, self.moved

    def counts(self) -> dict[str, int]:
        """The number of operations started, by group or channel."""
        return {channel: sequence.number for channel, sequence in list(self._sequences.items())}
