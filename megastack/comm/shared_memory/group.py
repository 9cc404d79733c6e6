"""Collectives and messages of the CPU ranks of one host through shared memory.

Small all-reduces send whole tensors, and every rank adds them. Large ones are a reduce-scatter and an all-gather, so
that each element is added on one rank. Both add in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megastack.comm.shared_memory.engine import Line, engine
from megastack.comm.shared_memory.memory import Memory, Peer
from megastack.comm.shared_memory.operations import Copy, Operation, Posting, Reduce, alias, describe, signature, span
from megastack.comm.shared_memory.plan import GroupPlan
from megastack.comm.shared_memory.rings import Reader, Writer

SPLIT_BYTES = 2**16
"""From this size an all-reduce of more than two ranks adds each element on one rank."""


class SharedWork:
    """An operation in progress, with the interface of ``torch.distributed.Work``."""

    __slots__ = ("_group", "_line", "_operation")

    def __init__(self, group: SharedGroup, line: Line, operation: Operation) -> None:
        self._group, self._line, self._operation = group, line, operation

    def wait(self) -> None:
        """Block until this rank's part is complete."""
        if not self._operation.done:
            group = self._group
            engine().wait(self._line, self._operation, group.timeout_s, group.failure)

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return immediately."""
        return self._operation.done


class SharedGroup:
    """One rank's access to a group in shared memory. The arguments of its operations are contiguous CPU tensors.

    Attributes:
        timeout_s: seconds after which a wait fails.
    """

    def __init__(
        self, plan: GroupPlan, rank: int, own: Memory, peers: Mapping[int, Peer], offset: int, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self._plan, self._me, self._peers = plan, plan.ranks.index(rank), peers
        me, members = self._me, range(len(plan.ranks))
        self._others = [m for m in members if m != me]
        ring, messages = plan.layouts(offset)
        bells = [self._peer(m).process.bell for m in self._others]
        self._writer = Writer(own, ring, bells)
        self._readers: list[Reader | None] = [
            None if m == me else Reader(self._peer(m).memory, ring, me - (me > m), self._peer(m).process.bell)
            for m in members
        ]
        self._line, self._number = Line(), 0
        self._sends: dict[int, tuple[Writer, Line, list[int]]] = {}
        self._receives: dict[int, tuple[Reader, Line, list[int]]] = {}
        for m, to, bell in zip(self._others, messages, bells, strict=False):
            self._sends[m] = Writer(own, to, [bell]), Line(), [0]
            back = messages[me - (me > m)]
            self._receives[m] = Reader(self._peer(m).memory, back, 0, bell), Line(), [0]

    def _peer(self, member: int) -> Peer:
        return self._peers[self._plan.ranks[member]]

    def all_reduce(self, buffer: Tensor, reduction: str = "sum") -> SharedWork:
        """Reduce in place."""
        size = len(self._plan.ranks)
        if size == 2 or buffer.numel() * buffer.itemsize < SPLIT_BYTES:
            head, flat = self._head("all_reduce", buffer, reduction), alias(buffer)
            posting = Posting(self._writer, head, [span(flat)], self._others)
            parts = [(0, 1)] * size
            return self._submit(
                Reduce(posting, self._readers, parts, flat, flat, reduction, head, self._mismatch, [buffer])
            )
        length = -(-buffer.numel() // size)
        rows = alias(buffer).split(length)
        rows += tuple(rows[0][:0] for _ in range(size - len(rows)))
        summed = self._reduce_rows("all_reduce", buffer, rows, rows[self._me], reduction)
        return self._gather_rows("all_reduce", buffer, rows, rows[self._me], after=summed)

    def reduce_scatter(self, out: Tensor, pieces: Tensor) -> SharedWork:
        """Sum ``pieces`` ``(size, …)``; ``out`` receives row ``rank`` and may be that row."""
        rows = alias(pieces).view(pieces.shape[0], -1).unbind(0)
        operation = self._reduce_rows("reduce_scatter", pieces, rows, alias(out), "sum", out)
        return SharedWork(self, self._line, operation)

    def all_gather(self, pieces: Tensor, own: Tensor | None = None) -> SharedWork:
        """Fill ``pieces`` ``(size, …)`` with the rows of all ranks; this rank's is ``own`` or already there."""
        rows = alias(pieces).view(pieces.shape[0], -1).unbind(0)
        if own is not None:
            rows[self._me].copy_(alias(own))
        return self._gather_rows("all_gather", pieces, rows, rows[self._me])

    def broadcast(self, x: Tensor, source: int) -> SharedWork:
        """Copy ``x`` of a member to all others."""
        head = self._head("broadcast", x)
        if source == self._me:
            posting = Posting(self._writer, head, [span(x)], self._others)
            return self._submit(Copy(posting, {}, head, self._mismatch, [x]))
        reader = self._readers[source]
        assert reader is not None
        return self._submit(Copy(None, {source: (reader, span(x), 0, 1)}, head, self._mismatch, [x]))

    def all_to_all(self, out: Sequence[Tensor], pieces: Sequence[Tensor]) -> SharedWork:
        """Send ``pieces[i]`` to member ``i`` and receive its piece in ``out[i]``; sizes may differ."""
        head = self._head("all_to_all", None)
        alias(out[self._me]).copy_(alias(pieces[self._me]))
        posting = Posting(self._writer, head, [span(pieces[m]) for m in self._others], self._others)
        sources = {m: (reader, span(out[m]), self._part(m), len(self._others)) for m, reader in self._by_member()}
        return self._submit(Copy(posting, sources, head, self._mismatch, [*out, *pieces]))

    def send(self, x: Tensor, member: int) -> SharedWork:
        """Send ``x``; complete when it has been written, and may then be modified."""
        writer, line, number = self._sends[member]
        number[0] += 1
        head = signature("message", number[0], x)
        return self._submit(Copy(Posting(writer, head, [span(x)], [member]), {}, head, self._mismatch, [x]), line)

    def receive(self, x: Tensor, member: int) -> SharedWork:
        """Receive the next message of a member."""
        reader, line, number = self._receives[member]
        number[0] += 1
        head = signature("message", number[0], x)
        return self._submit(Copy(None, {member: (reader, span(x), 0, 1)}, head, self._mismatch, [x]), line)

    def _reduce_rows(
        self, kind: str, x: Tensor, rows: Sequence[Tensor], out: Tensor, reduction: str, *kept: Tensor
    ) -> Operation:
        head = self._head(kind, x, reduction)
        posting = Posting(self._writer, head, [span(rows[m]) for m in self._others], self._others)
        parts = [(self._part(m), len(self._others)) for m in range(len(rows))]
        own = rows[self._me]
        operation = Reduce(posting, self._readers, parts, own, out, reduction, head, self._mismatch, [x, *kept])
        self._line.submit(operation)
        return operation

    def _gather_rows(
        self, kind: str, x: Tensor, rows: Sequence[Tensor], own: Tensor, after: Operation | None = None
    ) -> SharedWork:
        head = self._head(kind, x)
        posting = Posting(self._writer, head, [span(own)], self._others)
        sources = {m: (reader, span(rows[m]), 0, 1) for m, reader in self._by_member()}
        return self._submit(Copy(posting, sources, head, self._mismatch, [x, own], after))

    def _by_member(self) -> list[tuple[int, Reader]]:
        return [(m, reader) for m, reader in enumerate(self._readers) if reader is not None]

    def _part(self, member: int) -> int:
        """Which part of a member's pieces is for this rank."""
        return self._me - (self._me > member)

    def _head(self, kind: str, x: Tensor | None, reduction: str = "sum") -> bytes:
        self._number += 1
        return signature(kind, self._number, x, reduction)

    def _submit(self, operation: Operation, line: Line | None = None) -> SharedWork:
        line = line or self._line
        line.submit(operation)
        return SharedWork(self, line, operation)

    def _mismatch(self, member: int, mine: bytes, theirs: bytes) -> str:
        ranks = self._plan.ranks
        return (
            f"{self._plan.axis}: rank {ranks[self._me]} called {describe(mine)}, but rank {ranks[member]} called "
            f"{describe(theirs)}; all ranks of a group must call the same operations in the same order"
        )

    def failure(self, members: list[int], is_late: bool) -> str | None:
        """Describe why the pieces of members do not come; None if they may still come."""
        gone = [self._plan.ranks[m] for m in members if not self._peer(m).may_write()]
        if gone:
            return f"{self._plan.axis}: rank {gone[0]} ended while rank {self._plan.ranks[self._me]} waited for it"
        if is_late:
            late = [self._plan.ranks[m] for m in members]
            return f"{self._plan.axis}: no data from ranks {late} within {self.timeout_s:g} s"
        return None
