"""Differences between the transports: NCCL on a GPU, and on the CPU shared memory within a host and gloo otherwise.

Collectives choose a backend by their group and the device of their tensors. The ring algorithms of gloo copy through
internal buffers, so on the CPU simpler operations compute the same result faster. On a GPU each collective is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.flight_recorder import DeviceEvent, DeviceEvents
from megastack.comm.group import AxisGroup
from megastack.comm.shared_memory.group import SharedGroup


class Work(Protocol):
    """An operation in progress."""

    def wait(self) -> Any:
        """Block until the operation is complete; on a GPU, block the current stream."""

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return immediately."""


class Backend(Protocol):
    """The collectives whose implementation depends on the backend, and the properties that their callers depend on."""

    @property
    def process_groups(self) -> str:
        """The backends of a job on this device, for ``init_process_group``."""

    @property
    def wait_blocks_host(self) -> bool:
        """Whether waiting for an operation blocks the host."""

    @property
    def timeout_margin_s(self) -> float:
        """The seconds by which a process group's time-out exceeds the time-out of the run.

        NCCL ends a process that waits too long by SIGABRT. The run's own time-out must expire before that, so that the
        ranks report what they waited for.
        """

    @property
    def events(self) -> DeviceEvents | None:
        """Records events in the current stream of the device; None if waiting blocks the host."""

    @property
    def receive_lead(self) -> int:
        """The number of computations by which a receive may be posted ahead of its position in a schedule."""

    def start_all_reduce_(self, buffer: Tensor, group: AxisGroup, op: str) -> Work:
        """Reduce in place; ``op`` is ``sum``, ``max`` or ``min``."""

    def start_broadcast_(self, x: Tensor, group: AxisGroup, source: int) -> Work:
        """Copy ``x`` of rank ``source`` of the group to the others, in place."""

    def send(self, x: Tensor, group: AxisGroup, peer: int, channel: dist.ProcessGroup | None) -> Work:
        """Send a contiguous tensor to rank ``peer`` of the group, over a process group of the same ranks."""

    def receive_(self, x: Tensor, group: AxisGroup, peer: int, channel: dist.ProcessGroup | None) -> Work:
        """Fill a contiguous tensor with the next message of rank ``peer`` of the group."""

    def start_gather_(self, pieces: Tensor, group: AxisGroup, own: Tensor | None = None) -> Work:
        """Fill a contiguous ``(size, n)`` tensor with the rows of all ranks.

        This rank's row is ``own``, contiguous, or is already in ``pieces``.
        """

    def start_sum(self, out: Tensor, pieces: Tensor, group: AxisGroup) -> tuple[Work, Callable[[], Tensor]]:
        """Sum contiguous ``pieces`` ``(size, …)`` over the group; row ``group.rank`` of the sum goes to ``out``.

        Returns:
            The work, and a function that returns ``out``. Call it once after the wait.
        """


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _Torch:
    """The operations that are one call of torch.distributed with every backend."""

    def start_all_reduce_(self, buffer: Tensor, group: AxisGroup, op: str) -> Work:
        return dist.all_reduce(buffer, op=_OPS[op], group=group.group, async_op=True)

    def start_broadcast_(self, x: Tensor, group: AxisGroup, source: int) -> Work:
        return dist.broadcast(x, src=group.ranks[source], group=group.group, async_op=True)

    def send(self, x: Tensor, group: AxisGroup, peer: int, channel: dist.ProcessGroup | None) -> Work:
        return cast(Work, dist.isend(x, dst=group.ranks[peer], group=channel))

    def receive_(self, x: Tensor, group: AxisGroup, peer: int, channel: dist.ProcessGroup | None) -> Work:
        return cast(Work, dist.irecv(x, src=group.ranks[peer], group=channel))


class Gloo(_Torch):
    """Tensors on the CPU."""

    process_groups = "gloo"
    wait_blocks_host = True
    timeout_margin_s = 0.0
    events = None
    receive_lead = 1
    """Gloo matches messages in the background, so an earlier receive hides its handshake."""

    def start_gather_(self, pieces: Tensor, group: AxisGroup, own: Tensor | None = None) -> Work:
        """Broadcast each rank's row directly from and into the buffer.

        The all-gather of gloo copies through another buffer and takes about 1.5 times as long.
        """
        if own is not None:
            pieces[group.rank] = own
        rows = zip(group.ranks, pieces, strict=True)
        return _Works([dist.broadcast(row, src=rank, group=group.group, async_op=True) for rank, row in rows])

    def start_sum(self, out: Tensor, pieces: Tensor, group: AxisGroup) -> tuple[Work, Callable[[], Tensor]]:
        """Exchange the pieces and sum them locally.

        This takes half the time of gloo's reduce-scatter, and needs one more buffer until it is complete.
        """
        received = torch.empty_like(pieces)
        work = dist.all_to_all_single(received.view(-1), pieces.view(-1), group=group.group, async_op=True)
        return work, lambda: torch.sum(received, 0, dtype=out.dtype, out=out)


class SharedMemory(Gloo):
    """Tensors on the CPU of groups whose ranks are on one host; objects and barriers still use gloo."""

    def start_all_reduce_(self, buffer: Tensor, group: AxisGroup, op: str) -> Work:
        return _shared(group).all_reduce(buffer, op)

    def start_broadcast_(self, x: Tensor, group: AxisGroup, source: int) -> Work:
        return _shared(group).broadcast(x, source)

    def send(self, x: Tensor, group: AxisGroup, peer: int, channel: dist.ProcessGroup | None) -> Work:
        return _shared(group).send(x, peer)

    def receive_(self, x: Tensor, group: AxisGroup, peer: int, channel: dist.ProcessGroup | None) -> Work:
        return _shared(group).receive(x, peer)

    def start_gather_(self, pieces: Tensor, group: AxisGroup, own: Tensor | None = None) -> Work:
        return _shared(group).all_gather(pieces, own)

    def start_sum(self, out: Tensor, pieces: Tensor, group: AxisGroup) -> tuple[Work, Callable[[], Tensor]]:
        return _shared(group).reduce_scatter(out, pieces), lambda: out


def _shared(group: AxisGroup) -> SharedGroup:
    assert group.shared is not None, f"{group.axis}: the ranks do not share memory"
    return group.shared


class Nccl(_Torch):
    """Tensors on a GPU. A job on GPUs also keeps gloo for messages between hosts."""

    process_groups = "cpu:gloo,cuda:nccl"
    wait_blocks_host = False
    timeout_margin_s = 60.0
    receive_lead = 0
    """Operations between two ranks run in order, so an early receive could run before a send that the peer needs."""

    def __init__(self) -> None:
        self._events = CudaEvents()

    @property
    def events(self) -> DeviceEvents:
        """Timed CUDA events, which are used again once they are released."""
        return self._events

    def start_gather_(self, pieces: Tensor, group: AxisGroup, own: Tensor | None = None) -> Work:
        """One all-gather, which reads this rank's row where it is."""
        row = pieces[group.rank] if own is None else own
        work: Work = _all_gather(pieces.view(-1), row, group=group.group, async_op=True)
        return work

    def start_sum(self, out: Tensor, pieces: Tensor, group: AxisGroup) -> tuple[Work, Callable[[], Tensor]]:
        """One reduce-scatter."""
        return _reduce_scatter(out.view(-1), pieces.view(-1), group=group.group, async_op=True), lambda: out


class CudaEvents:
    """A pool of CUDA events with a time.

    A ``Work`` would also show whether the device has run an operation, but it holds the operation's output tensors.
    Kept until then, it would keep the memory of everything that the host has issued ahead.
    """

    def __init__(self) -> None:
        self._free: list[DeviceEvent] = []

    def record(self) -> DeviceEvent:
        """Record an event in the current stream."""
        if not torch.cuda.is_initialized():
            return _REACHED  # a dry run, in which the device computes nothing
        event: Any = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return cast(DeviceEvent, event)

    def release(self, event: DeviceEvent) -> None:
        """Keep an event for the next :meth:`record`."""
        if event is not _REACHED:
            self._free.append(event)

    def is_compute_stream(self) -> bool:
        """Whether the current stream is the default one. FSDP2 communicates on others."""
        return not torch.cuda.is_initialized() or torch.cuda.current_stream() == torch.cuda.default_stream()


class _Reached:
    """A position in the device's queue that it has passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


_REACHED = _Reached()


class _Works:
    """Several operations as one; waiting for it waits for all of them."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


_GLOO, _NCCL, _SHARED = Gloo(), Nccl(), SharedMemory()
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_choice: Backend | None = None  # for all threads, like the kernels' in layers/kernels.py


def backend_of(device: torch.device) -> Backend:
    """The backend for tensors on a device."""
    if _choice is not None:
        return _choice
    return _GLOO if device.type == "cpu" else _NCCL


def may_share_memory(device: torch.device) -> bool:
    """Whether ranks on such a device may communicate through shared memory."""
    return isinstance(backend_of(device), Gloo)


def transport_of(group: AxisGroup, device: torch.device) -> Backend:
    """The backend for tensors on a device that are communicated within a group."""
    return _SHARED if group.shared is not None and may_share_memory(device) else backend_of(device)


@contextmanager
def backend_choice(backend: Backend) -> Iterator[None]:
    """Use one backend for the tensors of every device inside; dry runs do."""
    global _choice
    previous, _choice = _choice, backend
    try:
        yield
    finally:
        _choice = previous
