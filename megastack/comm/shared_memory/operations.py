"""Operations on rings: what a rank writes for each, and what it does with the pieces of the others.

An operation is posted and taken piece by piece, as room and pieces become available; neither blocks. Sums are added in
the order of the ranks on every rank, so that all have the same bits. Sums of 16-bit numbers are added in fp32 and
rounded once.

Tensors are accessed by address: an operation may be advanced at any time, inside ``torch.inference_mode`` or outside,
and by another thread than the one that started it.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.shared_memory.plan import HEADER
from megastack.comm.shared_memory.rings import SIGNATURE, Piece, Reader, Writer, piece_at

_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
)
_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "message")
_REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
_DIMS = 10
_kind = struct.Struct(f"<BBBBQ{_DIMS}I")
_number = struct.Struct("<I")
assert _kind.size + _number.size == SIGNATURE

Span = tuple[int, int]
"""Address and number of bytes."""


def signature(kind: str, number: int, x: Tensor | None, reduction: str = "sum") -> bytes:
    """What all members of an operation must agree on: kind, dtype and shape of the tensor, number on their group."""
    head = _encoded(kind, None, (), reduction) if x is None else _encoded(kind, x.dtype, x.shape, reduction)
    return head + _number.pack(number & 0xFFFFFFFF)


@lru_cache(1024)
def _encoded(kind: str, dtype: torch.dtype | None, shape: tuple[int, ...], reduction: str) -> bytes:
    dims = [d & 0xFFFFFFFF for d in shape[:_DIMS]]
    code = 0 if dtype is None else _DTYPES.index(dtype)
    codes = _KINDS.index(kind), code, len(dims), list(_REDUCTIONS).index(reduction)
    return _kind.pack(*codes, math.prod(shape), *dims, *[0] * (_DIMS - len(dims)))


def describe(found: bytes) -> str:
    """An operation in words."""
    kind, dtype, rank, reduction, _, *dims = _kind.unpack_from(found)
    name, (number,) = _KINDS[kind], _number.unpack_from(found, _kind.size)
    text = f"{name} {number}"
    if reduction:
        text += f" ({list(_REDUCTIONS)[reduction]})"
    dtype_name = str(_DTYPES[dtype]).removeprefix("torch.")
    return text if name == "all_to_all" else f"{text} of {list(dims[:rank])} {dtype_name}"


def alias(x: Tensor) -> Tensor:
    """The elements of a contiguous tensor as a plain tensor of the same memory, without autograd and flat."""
    if not x.numel():
        return torch.empty(0, dtype=x.dtype)
    memory = (ctypes.c_char * (x.numel() * x.itemsize)).from_address(x.data_ptr())
    if not torch.is_inference_mode_enabled():
        return torch.frombuffer(memory, dtype=x.dtype)
    with torch.inference_mode(False):  # tensors of that mode cannot be written to outside of it
        return torch.frombuffer(memory, dtype=x.dtype)


def span(x: Tensor) -> Span:
    """The memory of a contiguous tensor."""
    return x.data_ptr(), x.numel() * x.itemsize


class Operation:
    """One rank's part in an operation.

    Attributes:
        done: whether this rank's part is complete.
    """

    def __init__(self, kept: Sequence[Tensor | None]) -> None:
        self.done = False
        self._kept: Sequence[Tensor | None] = kept  # alive while they are accessed by address

    def post(self) -> bool:
        """Write what there is room for; true if everything is written."""
        raise NotImplementedError

    def take(self) -> bool:
        """Use the pieces that have arrived; true if there is nothing more to take."""
        raise NotImplementedError

    def absent(self) -> list[int]:
        """The members whose pieces are missing."""
        raise NotImplementedError

    def finish(self) -> None:
        """Release the tensors."""
        self.done, self._kept = True, ()


class Posting:
    """The pieces that a rank writes: rows of bytes, cut together.

    Args:
        writer: the ring.
        head: the signature.
        rows: a part of each piece comes from each of them.
        readers: the members that read the ring.
    """

    def __init__(self, writer: Writer, head: bytes, rows: Sequence[Span], readers: Sequence[int]) -> None:
        self._readers = readers
        self._writer, self._head, self._rows = writer, head, rows
        self.width = width_of(writer.largest, len(rows))
        self._longest = max((length for _, length in rows), default=0)
        self.count = max(1, -(-self._longest // self.width)) if rows else 0
        self.written = 0

    def post(self) -> bool:
        """Write the pieces that there is room for; true if all are written."""
        while self.written < self.count:
            begin = self.written * self.width
            parts = [(at + begin, max(0, min(self.width, length - begin))) for at, length in self._rows]
            stride = min(self.width, self._longest - begin)
            if len(parts) > 1:
                stride = -(-stride // 64) * 64
            if not self._writer.write(self._head, self.written, parts, stride, is_last=self.written == self.count - 1):
                return False
            self.written += 1
        return True

    def blocked_by(self) -> list[int]:
        """The members that have to read before the next piece can be written."""
        return [] if self.written == self.count else [self._readers[i] for i in self._writer.slowest()]


def width_of(largest: int, rows: int) -> int:
    """The bytes of each row in a piece, a multiple of 64."""
    return max(64, largest // max(1, rows) // 64 * 64)


Mismatch = Callable[[int, bytes, bytes], str]
"""The error text for a member that takes part in another operation: the member, this rank's signature, and its."""


def checked(reader: Reader, offset: int, member: int, head: bytes, mismatch: Mismatch) -> Piece:
    """The header of a member's piece, which must belong to the expected operation.

    Raises:
        DistBackendError: it belongs to another one; names both.
    """
    found = reader.memory.buffer[offset : offset + SIGNATURE]
    if found != head:
        raise dist.DistBackendError(mismatch(member, head, found))
    return piece_at(reader.memory, offset)


class Copy(Operation):
    """Data that is moved: gathers, broadcasts, exchanges and messages.

    Args:
        posting: what this rank writes; None if nothing.
        sources: by member, its ring, where its data goes, and which part of its pieces is for this rank, of how many.
        head: the signature of the operation.
        mismatch: the error text for a member that takes part in another operation.
        kept: the tensors.
        after: an operation whose result this one sends.
    """

    def __init__(
        self,
        posting: Posting | None,
        sources: dict[int, tuple[Reader, Span, int, int]],
        head: bytes,
        mismatch: Mismatch,
        kept: Sequence[Tensor | None],
        after: Operation | None = None,
    ) -> None:
        super().__init__(kept)
        self._posting, self._sources, self._head, self._mismatch = posting, dict(sources), head, mismatch
        self._after = after

    def post(self) -> bool:
        if self._after is not None and not self._after.done:
            return False
        return self._posting is None or self._posting.post()

    def take(self) -> bool:
        for member, (reader, (address, length), part, parts) in list(self._sources.items()):
            while (offset := reader.peek()) is not None:
                piece = checked(reader, offset, member, self._head, self._mismatch)
                begin = piece.number * width_of(reader.largest, parts)
                taken = min(piece.stride, length - begin)
                if taken > 0:
                    at = reader.memory.address + offset + HEADER + part * piece.stride
                    ctypes.memmove(address + begin, at, taken)
                reader.pop(piece.stride * parts)
                if piece.is_last:
                    del self._sources[member]
                    break
        return not self._sources

    def absent(self) -> list[int]:
        return list(self._sources) or ([] if self._posting is None else self._posting.blocked_by())


class Reduce(Operation):
    """A sum, maximum or minimum over the members, added in their order.

    Args:
        posting: what this rank writes.
        readers: the rings of all members, in order; None for this rank.
        parts: by member, which part of its pieces is for this rank, and of how many.
        own: this rank's contribution, flat.
        out: receives the result, flat; may be ``own``.
        reduction: ``sum``, ``max`` or ``min``.
        head, mismatch, kept: as in :class:`Copy`.
    """

    def __init__(
        self,
        posting: Posting,
        readers: Sequence[Reader | None],
        parts: Sequence[tuple[int, int]],
        own: Tensor,
        out: Tensor,
        reduction: str,
        head: bytes,
        mismatch: Mismatch,
        kept: Sequence[Tensor | None],
    ) -> None:
        super().__init__(kept)
        self._posting, self._readers, self._parts = posting, readers, parts
        self._own, self._out, self._reduction = own, out, reduction
        self._head, self._mismatch = head, mismatch
        self._rank = readers.index(None)
        self._taken = 0

    def post(self) -> bool:
        return self._posting.post()

    def take(self) -> bool:
        posting = self._posting
        while self._taken < posting.count:
            offsets = [reader.peek() if reader is not None else 0 for reader in self._readers]
            if self._taken >= posting.written or None in offsets:
                return False
            self._combine(offsets)  # type: ignore[arg-type]
            self._taken += 1
        return True

    def absent(self) -> list[int]:
        absent = [member for member, reader in enumerate(self._readers) if reader is not None and reader.peek() is None]
        return absent or self._posting.blocked_by()

    def _combine(self, offsets: Sequence[int]) -> None:
        """Reduce one piece of all members."""
        width = self._posting.width // self._own.itemsize
        begin = self._taken * width
        own, out = self._own[begin : begin + width], self._out[begin : begin + width]
        values, lengths = [], []
        for member, (reader, offset, (part, parts)) in enumerate(zip(self._readers, offsets, self._parts, strict=True)):
            if reader is None:
                values.append(own)
                continue
            stride = checked(reader, offset, member, self._head, self._mismatch).stride
            if own.numel():
                values.append(reader.memory.elements(own.dtype, offset + HEADER + part * stride, own.numel()))
            lengths.append((reader, stride * parts))
        if own.numel():
            reduce_into(out, values, self._reduction, self._rank)
        for reader, length in lengths:
            reader.pop(length)


def reduce_into(out: Tensor, values: Sequence[Tensor], reduction: str, own: int) -> None:
    """Reduce tensors from the first to the last; ``out`` may share its memory with number ``own``."""
    if out.dtype is torch.bool:
        out, values = out.view(torch.uint8), [each.view(torch.uint8) for each in values]
        reduction = {"sum": "max"}.get(reduction, reduction)
    function = _REDUCTIONS[reduction]
    if reduction == "sum" and out.is_floating_point() and out.itemsize < 4 and len(values) > 2:
        total = values[0].float()
        for each in values[1:]:
            total.add_(each)
        out.copy_(total)
        return
    kept = values[own].clone() if own > 1 else None  # the first result may overwrite it
    function(values[0], values[1], out=out)
    for i, each in enumerate(values[2:], 2):
        function(out, kept if i == own and kept is not None else each, out=out)
