"""Collectives as functions: a tensor and a group in, a new tensor out.

Three rules hold for all of them. The input is never changed (those that work in place, on buffers that the caller owns,
end in an underscore). A group of one rank returns its input and counts nothing. Every call is counted in the group's
ledger. The ``start_…`` forms return a :class:`Pending` at once, so that work can run while bytes move.

None of these is differentiable; the conjugate pairs are in :mod:`megastack.comm.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.flight_recorder import Operation, Waited
from megastack.comm.group import AxisGroup

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A collective under way; :meth:`wait` returns its result, any number of times."""

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
            self._work = self._finish = None  # with the buffers that they hold
        assert self._result is not None
        return self._result

    def then(self, finish: Callable[[Tensor], Tensor]) -> Pending:
        """The same operation, whose result goes through ``finish`` at the end."""
        return Pending(None, lambda: finish(self.wait()))


def done(result: Tensor) -> Pending:
    """A pending operation that is complete already."""
    return Pending(None, lambda: result)


def _record(group: AxisGroup, op: str, payload: Tensor) -> Operation:
    """Count an operation in the ledger and put it on the trail."""
    group.ledger.record(group.axis, op, group.size, payload.numel() * payload.element_size())
    return group.begin(op, tuple(payload.shape))


def _pending(work: Any, group: AxisGroup, operation: Operation, finish: Callable[[], Tensor]) -> Pending:
    return Pending(Waited(work, group.flight_recorder, operation), finish)


def start_all_reduce_(buffer: Tensor, group: AxisGroup, op: str = "sum") -> Pending:
    """Reduce ``buffer`` over the group in place; the caller owns it and leaves it alone until :meth:`Pending.wait`."""
    if group.size == 1:
        return done(buffer)
    operation = _record(group, "all_reduce", buffer)
    work = dist.all_reduce(buffer, op=_OPS[op], group=group.group, async_op=True)
    return _pending(work, group, operation, lambda: buffer)


def start_reduce_scatter_(buffer: Tensor, group: AxisGroup, out: Tensor | None = None) -> Pending:
    """Sum a flat ``buffer`` over the group, of which this rank keeps its own equal piece, in place or in ``out``.

    The result is the view of that piece, or ``out``; the rest of the buffer has no meaning afterwards. The caller owns
    the buffer, whose size is a multiple of the group's, and leaves it alone until :meth:`Pending.wait`. On the CPU
    pieces are exchanged and added here, which takes gloo half the time of a reduce-scatter, and one more buffer until
    then.
    """
    if group.size == 1:
        return done(buffer if out is None else out.copy_(buffer))
    piece = own_piece(buffer, group) if out is None else out
    operation = _record(group, "reduce_scatter", buffer)
    if buffer.device.type != "cpu":
        work = _reduce_scatter_into(piece, buffer, group=group.group, async_op=True)
        return _pending(work, group, operation, lambda: piece)
    return _exchange(buffer.view(group.size, -1), group, operation).then(lambda pieces: torch.sum(pieces, 0, out=piece))


def start_all_gather_(buffer: Tensor, group: AxisGroup) -> Pending:
    """Fill a flat ``buffer``, of which each rank has its own equal piece, with the pieces of all, in place.

    On the CPU each rank broadcasts its piece, straight from and into the buffer: gloo's own gather goes through a copy
    and takes about one and a half times as long.
    """
    if group.size == 1:
        return done(buffer)
    operation = _record(group, "all_gather", buffer)
    return _pending(_gather_pieces_(buffer, group), group, operation, lambda: buffer)


def own_piece(buffer: Tensor, group: AxisGroup) -> Tensor:
    """This rank's equal piece of a flat buffer, a view."""
    assert buffer.numel() % group.size == 0, f"{buffer.numel()} elements are not a multiple of {group.size}"
    return buffer.view(group.size, -1)[group.rank]


def start_all_reduce(x: Tensor, group: AxisGroup, op: str = "sum") -> Pending:
    """Begin :func:`all_reduce`."""
    if group.size == 1:
        return done(x)
    return start_all_reduce_(x.clone(memory_format=torch.contiguous_format), group, op)


def all_reduce(x: Tensor, group: AxisGroup, op: str = "sum") -> Tensor:
    """The sum (``max``, ``min``) of every rank's ``x``, same shape, on every rank."""
    return start_all_reduce(x, group, op).wait()


def start_all_gather(x: Tensor, group: AxisGroup, dim: int = 0) -> Pending:
    """Begin :func:`all_gather`."""
    if group.size == 1:
        return done(x)
    pieces = x.new_empty((group.size, *x.shape))
    pieces[group.rank] = x
    operation = _record(group, "all_gather", pieces)
    return _pending(_gather_pieces_(pieces.view(-1), group), group, operation, lambda: _join(pieces, dim))


def all_gather(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """Every rank's ``x``, concatenated along ``dim`` in group order; shapes must agree."""
    return start_all_gather(x, group, dim).wait()


def start_reduce_scatter(x: Tensor, group: AxisGroup, dim: int = 0) -> Pending:
    """Begin :func:`reduce_scatter`; on the CPU pieces are exchanged and added here, as above."""
    if group.size == 1:
        return done(x)
    assert x.shape[dim] % group.size == 0, f"dim {dim} of {tuple(x.shape)} is not a multiple of {group.size}"
    pieces = _cut(x, group.size, dim)
    operation = _record(group, "reduce_scatter", pieces)
    if x.device.type == "cpu":
        return _exchange(pieces, group, operation).then(lambda arrived: arrived.sum(0, dtype=arrived.dtype))
    result = x.new_empty(pieces.shape[1:])
    work = _reduce_scatter_into(result.view(-1), pieces.view(-1), group=group.group, async_op=True)
    return _pending(work, group, operation, lambda: result)


def reduce_scatter(x: Tensor, group: AxisGroup, dim: int = 0) -> Tensor:
    """This rank's piece along ``dim`` of the sum of every rank's ``x``."""
    return start_reduce_scatter(x, group, dim).wait()


def broadcast(x: Tensor, group: AxisGroup, source: int = 0) -> Tensor:
    """The ``x`` of the group's member ``source``, on every rank; shapes must agree."""
    if group.size == 1:
        return x
    result = x.clone(memory_format=torch.contiguous_format)
    if group.rank == source:
        group.ledger.record(group.axis, "broadcast", group.size, result.numel() * result.element_size())
    with group.blocks("broadcast"):
        dist.broadcast(result, src=group.ranks[source], group=group.group)
    return result


def _exchange(pieces: Tensor, group: AxisGroup, operation: Operation) -> Pending:
    """Send each rank its piece, the first dim; the result has what each rank sent here."""
    arrived = torch.empty_like(pieces)
    work = dist.all_to_all_single(arrived.view(-1), pieces.view(-1), group=group.group, async_op=True)
    return _pending(work, group, operation, lambda: arrived)


class _Together:
    """Several works as one; to wait is to wait for all of them."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _gather_pieces_(buffer: Tensor, group: AxisGroup) -> Any:
    """The work that fills a flat buffer, which has this rank's own piece, with the pieces of all."""
    if buffer.device.type != "cpu":
        return _all_gather_into(buffer, own_piece(buffer, group), group=group.group, async_op=True)
    pieces = buffer.view(group.size, -1)
    return _Together(
        [
            dist.broadcast(piece, src=rank, group=group.group, async_op=True)
            for rank, piece in zip(group.ranks, pieces, strict=True)
        ]
    )


def _cut(x: Tensor, size: int, dim: int) -> Tensor:
    """``x`` as (size, …): its ``size`` equal pieces along ``dim``, contiguous."""
    dim = dim % x.dim()
    if dim == 0:
        return x.contiguous().view(size, x.shape[0] // size, *x.shape[1:])
    return torch.stack(x.chunk(size, dim))


def _join(pieces: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`_cut`."""
    dim = dim % (pieces.dim() - 1)
    return pieces.flatten(0, 1) if dim == 0 else torch.cat(pieces.unbind(0), dim)


_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
