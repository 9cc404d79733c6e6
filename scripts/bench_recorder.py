"""Measure the cost of counting and recording one operation and its wait.

Compares an observed operation with a bare recorder, which counts in integers and appends to a deque. Prints the thread
CPU time of each, as the minimum of many batches: ``python scripts/bench_recorder.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from megastack.comm.observer import ObservedWork, RankObserver

BATCHES, CALLS = 300, 200
RANKS, SHAPE, PAYLOAD = (0, 1, 2, 3), (2, 16, 64), 8192


class _Work:
    """An operation that is complete."""

    def wait(self) -> None:
        pass


class Bare:
    """The least that a recorder does: a number for each channel, calls and bytes, the last operations, the wait."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, int, int], int] = {}
        self.calls: dict[tuple[str, str], int] = {}
        self.bytes: dict[tuple[str, str], int] = {}
        self.operations: deque[tuple[object, ...]] = deque(maxlen=32)
        self.waiting: tuple[object, ...] | None = None
        self.moved = 0.0

    def start(
        self, axis: str, op: str, ranks: tuple[int, ...], shape: tuple[int, ...], size: int
    ) -> tuple[object, ...]:
        """Count and record an operation."""
        channel, kind = (axis, ranks[0], ranks[-1]), (axis, op)
        number = self.numbers[channel] = self.numbers.get(channel, 0) + 1
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.bytes[kind] = self.bytes.get(kind, 0) + size * 2 * (len(ranks) - 1) // len(ranks)
        operation = (axis, op, number, shape, ranks)
        self.operations.append(operation)
        self.moved = time.monotonic()
        return operation

    def wait(self, operation: tuple[object, ...], work: _Work) -> None:
        """Record a wait."""
        self.waiting, self.moved = operation, time.monotonic()
        work.wait()
        self.waiting, self.moved = None, time.monotonic()


def bare() -> Callable[[], object]:
    """One operation with the bare recorder."""
    recorder, work = Bare(), _Work()
    return lambda: recorder.wait(recorder.start("tp", "all_reduce", RANKS, SHAPE, PAYLOAD), work)


def observed() -> Callable[[], object]:
    """One operation with the observer of a training run."""
    observer, work = RankObserver(), _Work()
    return lambda: ObservedWork(work, observer, observer.on_operation("tp", "all_reduce", RANKS, SHAPE, PAYLOAD)).wait()


def microseconds(call: Callable[[], object]) -> float:
    """Thread CPU time of one call, as the minimum over batches."""
    return min(_batch(call) for _ in range(BATCHES))


def _batch(call: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - began) / CALLS / 1000


if __name__ == "__main__":
    least, ours = microseconds(bare()), microseconds(observed())
    print(f"bare recorder {least:.2f} us, observer {ours:.2f} us, ratio {ours / least:.2f}")
