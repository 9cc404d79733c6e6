"""Communication counters: the operations that a rank started on each axis, and the bytes that they move.

Logical operations are counted, whatever the backend actually sends. ``payload_bytes`` is the size of the tensor that
the operation produces or moves: the whole tensor of an all-reduce, the gathered side of an all-gather or a
reduce-scatter, the message of a send. ``wire_bytes`` is the ring-nominal number of bytes that this rank sends for it:

=====================================  =====================
operation on n ranks, S payload bytes  wire bytes
=====================================  =====================
all_reduce                             2 (n - 1) / n · S
all_gather, reduce_scatter             (n - 1) / n · S
all_to_all                             (n - 1) / n · S
broadcast (counted at the source)      S
send (a receive counts nothing)        S
=====================================  =====================
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Totals over some operations: the number of calls, the bytes of their tensors, and the bytes this rank sends."""

    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.calls + other.calls,
            self.payload_bytes + other.payload_bytes,
            self.wire_bytes + other.wire_bytes,
        )


def wire_bytes(op: str, size: int, payload_bytes: int) -> int:
    """Ring-nominal bytes that one rank of ``size`` sends for ``op`` (see the table in the module docstring)."""
    numerator, denominator = _wire_fraction(op, size)
    return numerator * payload_bytes // denominator


def _wire_fraction(op: str, size: int) -> tuple[int, int]:
    """Wire bytes per payload byte, as numerator and denominator."""
    if op == "all_reduce":
        return 2 * (size - 1), size
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return size - 1, size
    if op in ("send", "broadcast"):
        return 1, 1
    raise AssertionError(f"no wire cost for {op}")


class Counter:
    """Totals of one operation on one axis, as integers."""

    __slots__ = ("_denominator", "_numerator", "calls", "payload_bytes", "wire_bytes")

    def __init__(self, op: str, size: int) -> None:
        self.calls = self.payload_bytes = self.wire_bytes = 0
        self._numerator, self._denominator = _wire_fraction(op, size)

    def add(self, payload_bytes: int) -> None:
        """Count one operation."""
        self.calls += 1
        self.payload_bytes += payload_bytes
        self.wire_bytes += self._numerator * payload_bytes // self._denominator

    @property
    def traffic(self) -> Traffic:
        """The totals so far."""
        return Traffic(self.calls, self.payload_bytes, self.wire_bytes)


class Ledger:
    """Counters of one rank since the last :meth:`reset`, by axis (``dp``, ``tp``, ``pp``, …) and operation.

    Attributes:
        waited_s: by axis, the seconds that the host was blocked in waits; on a GPU, the seconds that the stream of the
            computation was.
    """

    def __init__(self) -> None:
        self.waited_s: dict[str, float] = defaultdict(float)
        self._counters: dict[tuple[str, str, int], Counter] = {}

    def counter(self, axis: str, op: str, size: int) -> Counter:
        """The counter of an operation over ``size`` ranks of ``axis``; valid across resets."""
        key = (str(axis), op, size)
        if key not in self._counters:
            self._counters[key] = Counter(op, size)
        return self._counters[key]

    def record(self, axis: str, op: str, size: int, payload_bytes: int) -> None:
        """Count one operation over ``size`` ranks of ``axis``."""
        self.counter(axis, op, size).add(payload_bytes)

    def total(self, axis: str | None = None, op: str | None = None) -> Traffic:
        """The sum over all operations that match; ``None`` matches everything."""
        total = Traffic()
        for (on, did), traffic in self.records().items():
            if axis in (None, on) and op in (None, did):
                total = total + traffic
        return total

    def records(self) -> Mapping[tuple[str, str], Traffic]:
        """The totals by (axis, operation)."""
        found: dict[tuple[str, str], Traffic] = {}
        for (axis, op, _), counter in self._counters.items():
            if counter.calls:
                found[axis, op] = found.get((axis, op), Traffic()) + counter.traffic
        return found

    @property
    def exposed_s(self) -> dict[str, float]:
        """By axis, the seconds of communication that no computation of this rank overlapped."""
        return dict(self.waited_s)

    def copy(self) -> Ledger:
        """A copy of the counters. The time of earlier waits that a device has not passed yet is added to the copy."""
        copied = Ledger()
        copied._counters = {key: copy.copy(counter) for key, counter in self._counters.items()}
        copied.waited_s, self.waited_s = self.waited_s, self.waited_s.copy()
        return copied

    def reset(self) -> None:
        """Set all counters to zero."""
        for counter in self._counters.values():
            counter.calls = counter.payload_bytes = counter.wire_bytes = 0
        self.waited_s = defaultdict(float)
