"""The ranks that communicate along one axis (or several fused ones), as a small value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from weakref import WeakValueDictionary

import torch.distributed as dist

from megastack.comm.flight_recorder import FlightRecorder, Operation
from megastack.comm.observer import NO_OBSERVER, Observer
from megastack.comm.shared_memory.group import SharedGroup


@dataclass(frozen=True)
class AxisGroup:
    """One rank's view of its peers along an axis.

    Attributes:
        rank: this rank's index among its peers, from 0.
        size: the number of peers, this rank included.
        ranks: their global ranks, in order.
        group: torch's process group; ``None`` when ``size`` is 1 and nothing is ever communicated.
        axis: the label of the group in counters and reports (``dp`` also stands for fused ``dp·cp``).
        observer: receives the operations on this group.
        shared: the group in shared memory, if its ranks are CPU ranks of one host; tensors on the CPU use it.
        handle: a string by which compiled code, which cannot hold a group, refers to it (:func:`group_of`). It is
            unique in this process. The first mesh of every process has the same handles.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    axis: str
    observer: Observer = field(default=NO_OBSERVER, compare=False)
    shared: SharedGroup | None = field(default=None, compare=False)
    handle: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names = chain([self.axis], (f"{self.axis}#{number}" for number in count(1)))
        object.__setattr__(self, "handle", next(name for name in names if name not in _BY_HANDLE))
        _BY_HANDLE[self.handle] = self

    @property
    def flight_recorder(self) -> FlightRecorder:
        """The flight recorder of this rank, for all groups of its mesh."""
        return self.observer.flight_recorder

    def begin(self, op: str, shape: tuple[int, ...] = (), payload_bytes: int | None = None) -> Operation | None:
        """Report that a collective of this group starts; without ``payload_bytes`` this rank does not count it."""
        return self.observer.on_operation(self.axis, op, self.ranks, shape, payload_bytes)

    @contextmanager
    def blocks(self, op: str, payload_bytes: int | None = None) -> Iterator[None]:
        """Context manager that reports the blocking collective inside it."""
        self.observer.begin_wait(self.begin(op, (), payload_bytes))
        yield
        self.observer.end_wait()

    @staticmethod
    def single(axis: str, observer: Observer = NO_OBSERVER, rank: int = 0) -> AxisGroup:
        """A group of this rank alone."""
        return AxisGroup(0, 1, (rank,), None, axis, observer)


_BY_HANDLE: WeakValueDictionary[str, AxisGroup] = WeakValueDictionary()


def group_of(handle: str) -> AxisGroup:
    """Return the group with a handle."""
    return _BY_HANDLE[handle]
