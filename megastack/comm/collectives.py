"""Functional collectives: a tensor and a group in, a new tensor out.

Three rules hold for all of them. The input is never modified; functions that work in place, on buffers that the caller
owns, end in an underscore. A group of one rank returns its input and reports nothing. Every other call is reported to
the group's observer. The ``start_…`` forms return a :class:`Pending` at once, so that computation can overlap with the
transfer.

While ``torch.compile`` traces, the blocking forms are operators (:mod:`megastack.comm.library_ops`); the others cannot
be traced.

None of these is differentiable, and autograd records none of them; the conjugate pairs are in
:mod:`megastack.comm.autograd`. Device-dependent implementations are in :mod:`megastack.comm.backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.backend import Work, backend_of, transport_of
from megastack.comm.flight_recorder import Operation
from megastack.comm.group import AxisGroup
from megastack.comm.observer import ObservedWork

_OPERATORS: Any = torch.ops.megastack
"""Where :mod:`megastack.comm.library_ops` registers the blocking collectives for compiled code."""


class Pending:
    """A collective in progress; :meth:`wait` returns its result, any number of times."""

    def __init__(self, work: Any, finish: Callable[[], Tensor]) -> None:
        self._work = work
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Block until the operation is complete and return its result."""
        if self._finish is not None:
            if self._work is not None:
                self._work.wait()
            self._result = self._finish()
            self._work = self._finish = None  # release their buffers
        assert self._result is not None
        return self._result

    def then(self, finish: Callable[[Tensor], Tensor]) -> Pending:
        """The same operation with ``finish`` applied to its result."""
        return Pending(None, lambda: finish(self.wait()))


def done(result: Tensor) -> Pending:
    """A pending operation that is already complete."""
    return Pending(None, lambda: result)


def _begin(group: AxisGroup, op: str, payload: Tensor) -> Operation | None:
    return group.begin(op, tuple(payload.shape), payload.numel() * payload.element_size())


def _pending(work: Work | None, group: AxisGroup, operation: Operation | None, finish: Callable[[], Tensor]) -> Pending:
    return Pending(ObservedWork(work, group.observer, operation), finish)


def start_all_reduce_(buffer: Tensor, group: AxisGroup, op: str = "sum") -> Pending:
    """Reduce ``buffer`` over the group in place; the caller owns it and must not use it until :meth:`Pending.wait`."""
    if group.size == 1:
        return done(buffer)
    operation = _begin(group, "all_reduce", buffer)
    work = transport_of(group, buffer.device).start_all_reduce_(buffer, group, op)
    return _pending(work, group, operation, lambda: buffer)


def start_reduce_scatter_(buffer: Tensor, group: AxisGroup, out: Tensor | None = None) -> Pending:
    """Sum a flat ``buffer`` over the group; this rank keeps its equal piece of the sum, in place or in ``out``.

    The result is a view of that piece, or ``out``; the rest of the buffer is undefined afterwards. The caller owns the
    buffer, whose size is a multiple of the group's, and must not use it until :meth:`Pending.wait`.
    """
    if group.size == 1:
        return done(buffer if out is None else out.copy_(buffer))
    piece = own_piece(buffer, group) if out is None else out
    operation = _begin(group, "reduce_scatter", buffer)
    work, finish = transport_of(group, buffer.device).start_sum(piece, buffer.view(group.size, -1), group)
    return _pending(work, group, operation, finish)


def start_all_gather_(buffer: Tensor, group: AxisGroup) -> Pending:
    """Fill a flat ``buffer`` in place with the equal pieces of all ranks; each rank has written its own piece."""
    if group.size == 1:
        return done(buffer)
    operation = _begin(group, "all_gather", buffer)
    work = transport_of(group, buffer.device).start_gather_(_pieces(buffer, group), group)
    return _pending(work, group, operation, lambda: buffer)


def own_piece(buffer: Tensor, group: AxisGroup) -> Tensor:
    """This rank's equal piece of a flat buffer, as a view."""
    return _pieces(buffer, group)[group.rank]


def _pieces(buffer: Tensor, group: AxisGroup) -> Tensor:
    """A flat buffer as its equal pieces ``(size, n)``, as a view."""
    assert buffer.numel() % group.size == 0, f"{buffer.numel()} elements are not a multiple of {group.size}"
    return buffer.view(group.size, -1)


def start_all_reduce(x: Tensor, group: AxisGroup, op: str = "sum") -> Pending:
    """Start :func:`all_reduce`."""
    if group.size == 1:
        return done(x)
    return start_all_reduce_(x.detach().clone(memory_format=torch.contiguous_format), group, op)


def all_reduce(x: Tensor, group: AxisGroup, op: str = "sum") -> Tensor:
    """The sum (``max``, ``min``) of every rank's ``x``, in the same shape, on every rank."""
    if group.size > 1 and torch.compiler.is_compiling():
        return _OPERATORS.all_reduce(x, group.handle, op)
    return start_all_reduce(x, group, op).wait()


def start_all_gather(x: Tensor, group: AxisGroup, dim: int = 0) -> Pending:
    """Start :func:`all_gather`."""
    if group.size == 1:
        return done(x)
    own = x.detach().contiguous()
    pieces = own.new_empty((group.size, *own.shape))
    operation = _begin(group, "all_gather", pieces)
    work = transport_of(group, x.device).start_gather_(pieces.view(group.size, -1), group, own.view(-1))
    return _pending(work, group, operation, lambda: _join(pieces, dim))


def all_gather(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """Every rank's ``x``, concatenated along ``dim`` in group order; shapes must agree."""
    if group.size > 1 and torch.compiler.is_compiling():
        return _OPERATORS.all_gather(x, group.handle, dim)
    return start_all_gather(x, group, dim).wait()


def start_reduce_scatter(x: Tensor, group: AxisGroup, dim: int = 0) -> Pending:
    """Start :func:`reduce_scatter`."""
    if group.size == 1:
        return done(x)
    assert x.shape[dim] % group.size == 0, f"dim {dim} of {tuple(x.shape)} is not a multiple of {group.size}"
    pieces = _cut(x.detach(), group.size, dim)
    operation = _begin(group, "reduce_scatter", pieces)
    work, finish = transport_of(group, x.device).start_sum(x.new_empty(pieces.shape[1:]), pieces, group)
    return _pending(work, group, operation, finish)


def reduce_scatter(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """This rank's piece along ``dim`` of the sum of every rank's ``x``."""
    if group.size > 1 and torch.compiler.is_compiling():
        return _OPERATORS.reduce_scatter(x, group.handle, dim)
    return start_reduce_scatter(x, group, dim).wait()


def broadcast(x: Tensor, group: AxisGroup, source: int = 0) -> Tensor:
    """The ``x`` of rank ``source`` of the group, on every rank; shapes must agree."""
    if group.size == 1:
        return x
    result = x.detach().clone(memory_format=torch.contiguous_format)
    with group.blocks("broadcast", result.numel() * result.element_size() if group.rank == source else None):
        transport_of(group, x.device).start_broadcast_(result, group, source).wait()
    return result


def connect(groups: Iterable[AxisGroup], device: torch.device) -> None:
    """Create the communicators of groups, with one all-reduce over each; called on all ranks of every group.

    In the first operation of a group, NCCL connects its ranks, and their hosts wait for each other. All ranks go
    through their groups in one order: by their ranks, then by name. The first group in this order that is not connected
    yet is therefore the next one of each of its ranks, so ranks never wait for each other in a cycle. The operations
    are recorded but not counted.
    """
    real = [group for group in groups if group.group is not None]
    for group in sorted(real, key=_order):
        operation, x = group.begin("all_reduce", (1,)), torch.zeros(1, device=device)
        work = dist.all_reduce(x, group=group.group, async_op=True)
        ObservedWork(work, group.observer, operation).wait()


def _order(group: AxisGroup) -> tuple[tuple[int, ...], str]:
    assert group.group is not None
    return group.ranks, group.group.group_name


def _cut(x: Tensor, size: int, dim: int) -> Tensor:
    """``x`` as its ``size`` equal pieces along ``dim``, contiguous, of shape ``(size, …)``.

    Where the dims before ``dim`` have size 1 (a sequence of a microbatch of one sample) this is a view.
    """
    dim = dim % x.dim()
    if all(length == 1 for length in x.shape[:dim]):
        return x.contiguous().view(size, *x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :])
    return torch.stack(x.chunk(size, dim))


def _join(pieces: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`_cut`, a view in the same cases."""
    size, *shape = pieces.shape
    dim = dim % len(shape)
    if all(length == 1 for length in shape[:dim]):
        return pieces.view(*shape[:dim], size * shape[dim], *shape[dim + 1 :])
    return torch.cat(pieces.unbind(0), dim)


# Collectives for FSDP2, so that its communication is counted as well.


class _Collective:
    """FSDP2's interface for custom communication."""

    def __init__(self, group: AxisGroup, dtype: torch.dtype | None = None) -> None:
        self._group, self._dtype = group, dtype

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedGather(_Collective):
    """The all-gather; its input is already a part of its output.

    Where waiting blocks the host, FSDP2 waits when the parameters are used. On a GPU the gather runs on the stream that
    FSDP2 selected, which waits immediately.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        gathering = start_all_gather_(output_tensor, self._group)
        if backend_of(output_tensor.device).wait_blocks_host:
            return _Gathering(gathering)
        gathering.wait()
        return None


class _Gathering(dist.Work):
    """A gather in progress, with the interface that FSDP2 expects."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._pending.wait()
        return True


class CountedReduce(_Collective):
    """The reduce-scatter, in the communication dtype."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        sent = input_tensor.to(self._dtype or input_tensor.dtype)
        if sent is input_tensor:
            start_reduce_scatter_(sent, self._group, output_tensor).wait()
        else:
            output_tensor.copy_(start_reduce_scatter_(sent, self._group).wait())
