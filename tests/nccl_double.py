"""A test double of NCCL over gloo on the CPU, for what megastack must not rely on and what it must survive.

- An operation runs later, on the thread of its communicator, in the order in which the host issued them.
- ``wait()`` returns at once (or after ``run_ahead_s``): it makes the stream of this process wait, not the host. When
  the host reads a tensor (``tolist``, ``item``, ``float``, …), it blocks until the stream has passed all waits.
- Two ranks are connected by their first message: both hosts block in that call until both have reached it
  (``p2p="lazy"``). With ``p2p="eager"`` all messages of a group run in one order instead.
- An operation that takes longer than the time-out of its group, counted from the call, ends the process by SIGABRT.
- An operation with a rank that is gone never completes.
- Collectives on small Python values block the host: a job on GPUs keeps gloo for them.

:func:`install` makes it the backend of CPU tensors in this process and in processes forked from it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megastack.comm import backend
from megastack.comm.backend import Nccl

NAME = "nccl_double"
READS = ("tolist", "item", "__float__", "__int__", "__bool__", "__format__", "numpy")
NEVER = timedelta(hours=1)
HOST_DTYPES = (torch.uint8, torch.int64)
"""Pickled values and their sizes."""


class Work(dist.Work):
    """An operation that another thread completes."""

    def __init__(self, double: Double, timeout: timedelta, *, blocks: bool = False) -> None:
        super().__init__()
        self.double, self.blocks, self.done, self.done_at = double, blocks, threading.Event(), 0.0
        self.deadline = time.monotonic() + timeout.total_seconds()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the stream wait; the host continues."""
        self.done.wait(None if self.blocks else self.double.run_ahead_s)
        self.double.stream.append(self)
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Event:
    """A point in the stream, which its device reaches when the waits before it are over."""

    def __init__(self, works: list[Work]) -> None:
        self.works, self.recorded_at = works, time.monotonic()

    def query(self) -> bool:
        return all(work.done.is_set() for work in self.works)

    def elapsed_time(self, end: Event) -> float:
        return (end.reached_at - self.reached_at) * 1e3

    @property
    def reached_at(self) -> float:
        return max(self.recorded_at, *(work.done_at for work in self.works), 0.0)


class Double(Nccl):
    """The backend: one stream for each process, and the timer that ends it.

    Attributes:
        used: the communicators that were used: the name of the group, and the peer for messages.
        released: how many events are no longer needed.
    """

    process_groups = NAME

    def __init__(self, run_ahead_s: float, p2p: str, margin_s: float) -> None:
        self.run_ahead_s, self.p2p, self.timeout_margin_s = run_ahead_s, p2p, margin_s
        self.released = 0
        self.used: set[tuple[str, int | None]] = set()
        self.stream: list[Work] = []
        self.issued: list[Work] = []

    @property
    def events(self) -> Double:  # type: ignore[override]
        return self

    def record(self) -> Event:
        self.stream = [work for work in self.stream if not work.done.is_set()]
        return Event(list(self.stream))

    def release(self, event: Event) -> None:
        self.released += 1

    def is_compute_stream(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Block the host until the stream has passed all waits."""
        for work in list(self.stream):
            work.done.wait()

    def abort_late(self) -> None:
        """What NCCL's watchdog thread does."""
        while True:
            time.sleep(0.05)
            self.issued = [work for work in self.issued if not work.done.is_set()]
            if any(time.monotonic() > work.deadline for work in self.issued):
                os.abort()


class Communicator:
    """Runs operations in order on a thread."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[Work, Callable[[], Any]]] = queue.Queue()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            work, call = self.calls.get()
            try:
                call().wait()
            except RuntimeError:  # a rank is gone; NCCL does not notice
                return
            work.done_at = time.monotonic()
            work.done.set()


class Group(dist.ProcessGroup):
    """A process group whose operations run on threads."""

    def __init__(self, double: Double, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.double, self.store, self.timeout = double, store, timeout
        self.inner = dist.ProcessGroupGloo(store, rank, size, NEVER)
        self.collectives = Communicator()
        self.pairs: dict[int, Communicator] = {}

    def issue(self, communicator: Communicator, call: Callable[[], Any], *, blocks: bool = False) -> Work:
        if not blocks:
            self.double.used.add((self.group_name, next((p for p, c in self.pairs.items() if c is communicator), None)))
        work = Work(self.double, self.timeout, blocks=blocks)
        self.double.issued.append(work)
        communicator.calls.put((work, call))
        return work

    def pair(self, peer: int) -> Communicator:
        """The communicator of a pair of ranks; both connect in their first call."""
        if self.double.p2p == "eager":
            return self.collectives
        if peer not in self.pairs:
            ends = sorted((self.rank(), peer))
            self.store.set(f"pair/{ends}/{self.rank()}", "")
            self.store.wait([f"pair/{ends}/{peer}"], NEVER)
            self.pairs[peer] = Communicator()
        return self.pairs[peer]

    @property
    def group_name(self) -> Any:
        return distributed_c10d._world.pg_names[self]

    def getBackendName(self) -> str:
        return NAME

    def setTimeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def allreduce(self, tensors: Any, options: Any) -> Work:
        return self.issue(self.collectives, lambda: self.inner.allreduce(tensors, options))

    def all_gather_single(self, out: Any, x: Any, options: Any) -> Work:
        return self.issue(self.collectives, lambda: self.inner._allgather_base(out, x, options))

    def reduce_scatter_single(self, out: Any, x: Any, options: Any) -> Work:
        return self.issue(self.collectives, lambda: self.inner._reduce_scatter_base(out, x, options))

    def broadcast(self, tensors: Any, options: Any) -> Work:
        blocks = tensors[0].dtype in HOST_DTYPES
        return self.issue(self.collectives, lambda: self.inner.broadcast(tensors, options), blocks=blocks)

    def allgather(self, outs: Any, tensors: Any, options: Any) -> Work:
        return self.issue(self.collectives, lambda: self.inner.allgather(outs, tensors, options), blocks=True)

    def gather(self, outs: Any, tensors: Any, options: Any) -> Work:
        return self.issue(self.collectives, lambda: self.inner.gather(outs, tensors, options), blocks=True)

    def scatter(self, outs: Any, tensors: Any, options: Any) -> Work:
        return self.issue(self.collectives, lambda: self.inner.scatter(outs, tensors, options), blocks=True)

    def barrier(self, opts: Any) -> Work:
        return self.issue(self.collectives, lambda: self.inner.barrier(opts), blocks=True)

    def send(self, tensors: Any, peer: int, tag: int) -> Work:
        return self.issue(self.pair(peer), lambda: self.inner.send(tensors, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int) -> Work:
        return self.issue(self.pair(peer), lambda: self.inner.recv(tensors, peer, tag))


def install(
    monkeypatch: pytest.MonkeyPatch, *, run_ahead_s: float = 0.0, p2p: str = "lazy", margin_s: float = 1.0
) -> Double:
    """Use the double for CPU tensors, until the test ends.

    Args:
        run_ahead_s: how long a wait blocks the host at most. With a second or so, the numbers of a run that does not
            hang are right, although computation on the CPU is not delayed as on a stream.
        p2p: ``lazy`` or ``eager``.
        margin_s: how much later than ``launch.timeout_s`` it ends a process.
    """
    double = Double(run_ahead_s, p2p, margin_s)
    timers: list[int] = []

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Group:
        if os.getpid() not in timers:
            timers.append(os.getpid())
            threading.Thread(target=double.abort_late, daemon=True).start()
        return Group(double, store, rank, size, timeout)

    def blocking(read: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, *arguments: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                double.synchronize()
            return read(x, *arguments)

        return call

    dist.Backend.register_backend(f"{NAME}", create, devices=["cpu"])
    monkeypatch.setattr(backend, "_GLOO", double)
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, blocking(getattr(torch.Tensor, name)))
    return double
