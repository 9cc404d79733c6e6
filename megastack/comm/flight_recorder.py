"""The trail of a rank: the operations it started last, and the one that it waits for now.

The ledger counts; the trail remembers, so that a rank which waits in vain can say for what, and for whom. Operations
of a group are numbered from 1 in the order in which this rank starts them, messages by their line (source to
destination): the same number on two ranks is the same operation. It costs less than a microsecond an operation and is
never reset.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

KEPT = 32
"""How many operations, and how many actions, are remembered."""
MESSAGES = {"send": "receive", "receive": "send"}
"""Operations between two ranks, and what the other one of them does."""


class Operation(NamedTuple):
    """One collective or message; ``ranks`` are the global ranks that take part, of a message (source, destination)."""

    axis: str
    op: str
    number: int
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def line(self) -> str:
        """What counts the operations that this one is one of."""
        return line_of(self.axis, self.op, self.ranks)

    @property
    def other(self) -> Operation:
        """The same operation as a rank sees it that takes part as well."""
        return self._replace(op=MESSAGES.get(self.op, self.op))

    def __str__(self) -> str:
        text = f"{self.axis} {self.op} {self.number}"
        if self.shape:
            text += f" of {list(self.shape)}"
        if self.op not in MESSAGES:
            return text
        return f"{text} {'to' if self.op == 'send' else 'from'} rank {self.ranks[self.op == 'send']}"


def line_of(axis: str, op: str, ranks: tuple[int, ...]) -> str:
    """The name of a line of operations, the same on every rank."""
    if op in MESSAGES:
        return f"{axis} {op} {ranks[0]}>{ranks[1]}"
    return f"{axis} {ranks[0]}-{ranks[-1]}/{len(ranks)}"


def _key(axis: str, op: str, ranks: tuple[int, ...]) -> tuple[Hashable, ...]:
    """What a trail counts a line by; cheaper than its name."""
    return axis, op in MESSAGES and op, ranks[0], ranks[-1], len(ranks)


class FlightRecorder:
    """What one rank did last.

    Attributes:
        layer: the layer being computed, where that is known.
        waiting: the operation that this rank waits for; it stays after a wait that failed.
        since: when (``time.monotonic``) the transport began to wait for it.
        moved: when this rank last started, waited for or got anything.
        operations: the last ones, the newest last.
        actions: likewise, of the pipeline.
    """

    def __init__(self) -> None:
        self.layer: str | None = None
        self.waiting: Operation | None = None
        self.since = self.moved = time.monotonic()
        self.operations: deque[Operation] = deque(maxlen=KEPT)
        self.actions: deque[object] = deque(maxlen=KEPT)
        self._numbers: dict[tuple[Hashable, ...], int] = {}

    def start(self, axis: str, op: str, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Operation:
        """Note that this rank takes part in an operation from now on."""
        key = _key(axis, op, ranks)
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        operation = Operation(axis, op, number, shape, ranks)
        self.operations.append(operation)
        self.moved = time.monotonic()
        return operation

    def act(self, action: object) -> None:
        """Note the action of the pipeline that begins; its layer is not known yet."""
        self.actions.append(action)
        self.layer = None
        self.moved = time.monotonic()

    @contextmanager
    def waits(self, operation: Operation) -> Iterator[None]:
        """While this rank waits for an operation."""
        self.begin_wait(operation)
        yield
        self.end_wait()

    def begin_wait(self, operation: Operation, since: float | None = None) -> None:
        """This rank waits from now on, and the transport since then, if it began earlier."""
        self.waiting, self.moved = operation, time.monotonic()
        self.since = self.moved if since is None else since

    @contextmanager
    def local_work(self) -> Iterator[None]:
        """This rank's own work inside an operation of several rounds, which it has not arrived at until that is done.

        Nothing changes where no operation is waited for.
        """
        operation = self.waiting
        if operation is None:
            yield
            return
        key = _key(operation.axis, operation.op, operation.ranks)
        self._numbers[key] -= 1
        self.end_wait()
        try:
            yield
        finally:
            self._numbers[key] += 1
            self.begin_wait(operation)

    def end_wait(self) -> None:
        """What this rank waited for has come."""
        self.waiting, self.moved = None, time.monotonic()

    def counts(self) -> dict[str, int]:
        """How many operations were started, by line."""
        return {
            f"{axis} {op} {first}>{last}" if op else f"{axis} {first}-{last}/{size}": number
            for (axis, op, first, last, size), number in list(self._numbers.items())
        }


class Waited:
    """Work of the backend whose wait shows on the trail."""

    __slots__ = ("_operation", "_started", "_trail", "_work")

    def __init__(self, work: Any, flight_recorder: FlightRecorder, operation: Operation) -> None:
        self._work, self._trail, self._operation = work, flight_recorder, operation
        self._started = None if operation.op in MESSAGES else time.monotonic()

    def wait(self) -> None:
        """Block until the work is complete.

        The time-out of a collective counts from its start, the time-out of a message from here.
        """
        self._trail.begin_wait(self._operation, self._started)
        self._work.wait()
        self._trail.end_wait()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return bool(self._work.is_completed())
