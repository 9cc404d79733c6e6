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


class Ledger:
    """Counters of one rank since the last :meth:`reset`, by axis (``dp``, ``tp``, ``pp``, …) and operation.

    Attributes:
        exposed_s: by axis, the seconds that the host was blocked in waits; None if waits do not block the host.
    """

    def __init__(self) -> None:
        self.exposed_s: dict[str, float] | None = {}
        self._totals: dict[tuple[str, str, int], list[int]] = {}

    def record(self, axis: str, op: str, size: int, payload_bytes: int) -> None:
        """Count one operation over ``size`` ranks of ``axis``."""
        totals = self._totals.get((axis, op, size))
        if totals is None:
            totals = self._totals[axis, op, size] = [0, 0, 0, *_wire_fraction(op, size)]
        totals[0] += 1
        totals[1] += payload_bytes
        totals[2] += totals[3] * payload_bytes // totals[4]

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
        for (axis, op, _), (calls, payload, wire, *_) in self._totals.items():
            key = (str(axis), op)
            found[key] = found.get(key, Traffic()) + Traffic(calls, payload, wire)
        return found

    def reset(self) -> None:
        """Set all counters to zero."""
        self._totals.clear()
        if self.exposed_s is not None:
            self.exposed_s.clear()
