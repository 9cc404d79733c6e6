"""Observers of a rank's communication.

Every group of a mesh reports to one observer. Collectives and messages call it when they start and around their wait;
the pipeline and the model call it when an action or a layer begins. A bare mesh has :data:`NO_OBSERVER`, which does
nothing. A training run installs a :class:`RankObserver`, which counts traffic and feeds the flight recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.autograd.profiler import record_function

from megastack.comm.flight_recorder import DeviceEvents, FlightRecorder, Operation, OperationSequence
from megastack.comm.traffic import Ledger

_Key = tuple[str, str, int, int, int, bool]
"""Axis, operation, first rank, last rank, number of ranks, whether it is not counted; cheaper than a name."""


def _no_count(payload_bytes: int) -> None:
    """Count nothing."""


class Observer(Protocol):
    """Called for each operation of a rank. Implementations must be cheap and must not communicate."""

    @property
    def ledger(self) -> Ledger:
        """The communication counters; empty if nothing is counted."""

    @property
    def flight_recorder(self) -> FlightRecorder:
        """The flight recorder; empty if nothing is recorded."""

    def on_operation(
        self, axis: str, op: str, ranks: tuple[int, ...], shape: tuple[int, ...], payload_bytes: int | None
    ) -> Operation | None:
        """Called when an operation starts on this rank.

        Args:
            axis: the label of its group.
            op: the name of the operation, such as ``all_reduce`` or ``send``.
            ranks: the global ranks that take part; for a message, source and destination.
            shape: the shape of its tensor; empty if there is none.
            payload_bytes: the bytes to count; ``None`` if this rank does not count the operation.

        Returns:
            A handle for :meth:`begin_wait`.
        """

    def on_started(self) -> float | None:
        """Called when the call that starts the operation returned; returns when it began (``time.monotonic``)."""

    def begin_wait(self, operation: Operation | None, since: float | None = None) -> None:
        """Called before a wait for an operation that began at ``since`` (``time.monotonic``), or now."""

    def end_wait(self) -> None:
        """Called when a wait returned, but not if it failed."""

    def use_device(self, events: DeviceEvents | None) -> None:
        """Called once by the mesh, before any operation.

        Args:
            events: records events in the current stream; None if a wait blocks the host until an operation is complete.
        """

    def on_action(self, action: object) -> None:
        """Called when an action of the pipeline schedule begins."""

    def on_layer(self, name: str | None) -> None:
        """Called when the forward of a layer begins."""


class _NoObserver:
    """Ignores every call."""

    @property
    def ledger(self) -> Ledger:
        return Ledger()

    @property
    def flight_recorder(self) -> FlightRecorder:
        return FlightRecorder()

    def on_operation(
        self, axis: str, op: str, ranks: tuple[int, ...], shape: tuple[int, ...], payload_bytes: int | None
    ) -> None:
        return None

    def on_started(self) -> None:
        pass

    def begin_wait(self, operation: Operation | None, since: float | None = None) -> None:
        pass

    def end_wait(self) -> None:
        pass

    def use_device(self, events: DeviceEvents | None) -> None:
        pass

    def on_action(self, action: object) -> None:
        pass

    def on_layer(self, name: str | None) -> None:
        pass


NO_OBSERVER: Observer = _NoObserver()


class RankObserver:
    """Counts the traffic of one rank and records its last operations.

    Attributes:
        ledger: the communication counters.
        flight_recorder: the last operations, for failure reports; never reset.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.flight_recorder = FlightRecorder(self.ledger)
        self._start = self.flight_recorder.start
        self._known: dict[_Key, tuple[OperationSequence, Callable[[int], None]]] = {}
        self.on_started = self.flight_recorder.started
        self.begin_wait = self.flight_recorder.begin_wait
        self.end_wait = self.flight_recorder.end_wait
        self.on_action = self.flight_recorder.act

    def use_device(self, events: DeviceEvents | None) -> None:
        """Use ``events`` to find out whether a device has passed a wait, and how long it took."""
        if events is not None:
            self.flight_recorder.use_device(events)
            self.begin_wait = self.flight_recorder.begin_stream_wait
            self.end_wait = self.flight_recorder.end_stream_wait

    @property
    def exposed_s(self) -> dict[str, float]:
        """See :attr:`~megastack.comm.traffic.Ledger.exposed_s`."""
        return self.ledger.exposed_s

    def on_operation(
        self, axis: str, op: str, ranks: tuple[int, ...], shape: tuple[int, ...], payload_bytes: int | None
    ) -> Operation:
        """Count the operation and record it."""
        key = (axis, op, ranks[0], ranks[-1], len(ranks), payload_bytes is None)
        known = self._known.get(key)
        if known is None:
            count: Callable[[int], None] = (
                _no_count if payload_bytes is None else self.ledger.counter(axis, op, len(ranks)).add
            )
            known = self._known[key] = (self.flight_recorder.sequence(axis, op, ranks), count)
        sequence, count = known
        if payload_bytes is not None:
            count(payload_bytes)
        return self._start(axis, op, shape, ranks, sequence)

    def on_layer(self, name: str | None) -> None:
        """Record the layer."""
        self.flight_recorder.layer = name


class ObservedWork:
    """An operation of the backend whose waits are reported to an observer."""

    __slots__ = ("_observer", "_operation", "_started", "_work")

    def __init__(self, work: Any, observer: Observer, operation: Operation | None) -> None:
        self._work, self._observer, self._operation = work, observer, operation
        self._started = observer.on_started()

    def wait(self) -> None:
        """Block until the work is complete."""
        self._observer.begin_wait(self._operation, self._started)
        self._work.wait()
        self._observer.end_wait()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return immediately."""
        return bool(self._work.is_completed())


class _Annotations:
    """Named ranges in a profile: the actions of a rank, the start of its operations, and its waits for them.

    All operations of a kind on an axis have the same name, so that a viewer can sum their times.
    """

    def __init__(self, observer: RankObserver) -> None:
        self._act, self._start = observer.on_action, observer.on_operation
        self._begin, self._end = observer.begin_wait, observer.end_wait
        self._action: record_function | None = None
        self._wait: record_function | None = None

    def on_action(self, action: object) -> None:
        self.end_action()
        self._action = _opened(str(action))
        self._act(action)

    def end_action(self) -> None:
        _close(self._action)
        self._action = None

    def on_operation(
        self, axis: str, op: str, ranks: tuple[int, ...], shape: tuple[int, ...], payload_bytes: int | None
    ) -> Operation:
        operation = self._start(axis, op, ranks, shape, payload_bytes)
        with record_function(f"start {axis} {op}"):
            return operation

    def begin_wait(self, operation: Operation | None, since: float | None = None) -> None:
        self._begin(operation, since)
        self._wait = _opened("wait" if operation is None else f"wait for {operation.axis} {operation.op}")

    def end_wait(self) -> None:
        _close(self._wait)
        self._wait = None
        self._end()


def _opened(name: str) -> record_function:
    opened = record_function(name)
    opened.__enter__()
    return opened


def _close(opened: record_function | None) -> None:
    if opened is not None:
        opened.__exit__(None, None, None)


@contextmanager
def annotated(observer: Observer) -> Iterator[None]:
    """Show the actions and operations of a rank as named ranges in a profile that torch records inside."""
    if not isinstance(observer, RankObserver):
        yield
        return
    annotations, names = _Annotations(observer), ("on_action", "on_operation", "begin_wait", "end_wait")
    usual = {name: vars(observer).get(name) for name in names}
    for name in names:
        setattr(observer, name, getattr(annotations, name))
    try:
        yield
    finally:
        annotations.end_action()
        for name, method in usual.items():
            if method is None:
                delattr(observer, name)
            else:
                setattr(observer, name, method)
