"""One-way streams of pieces through a ring in shared memory, from one process to one or several others.

A piece is a header of 64 bytes and data, contiguous. The writer posts a semaphore of each reader per piece. Readers
return credit in quarters of the ring. A piece has at most an eighth of the ring, so that a writer whose readers have
read everything always has room: skipped bytes at the end of the ring included, a piece takes at most a quarter, and
less than a quarter is read without having been credited.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

from megastack.comm.shared_memory import semaphores
from megastack.comm.shared_memory.memory import Memory
from megastack.comm.shared_memory.plan import HEADER, Layout

SIGNATURE = 56
_WRAP = b"\xff" * 8
"""In place of a header: the next piece is at the start of the ring."""
_LAST = 1 << 31
_place = struct.Struct("<II")


def initialise(layout: Layout, memory: Memory) -> None:
    """Create the semaphores of a ring, in memory of zeros, before any reader uses them."""
    for reader in range(layout.readers):
        semaphores.create(memory.address + layout.filled(reader))
        semaphores.create(memory.address + layout.credit(reader))


class Writer:
    """The writing end of a ring in this process's memory.

    Args:
        memory: this process's.
        layout: the ring.
        bells: the address on which each reader sleeps.
    """

    def __init__(self, memory: Memory, layout: Layout, bells: Sequence[int]) -> None:
        self._memory, self._layout, self.largest = memory, layout, layout.largest
        self._posts = [(memory.address + layout.filled(i), bell) for i, bell in enumerate(bells)]
        self._credits = [memory.address + layout.credit(i) for i in range(len(bells))]
        self._credited = [0] * len(bells)
        self._position = self._written = 0

    def write(
        self, signature: bytes, index: int, parts: Sequence[tuple[int, int]], stride: int, *, is_last: bool
    ) -> bool:
        """Write one piece; false if there is no room yet.

        Args:
            signature: the first 56 bytes of the header.
            index: of the piece in its operation.
            parts: address and bytes of each part of the data.
            stride: the distance between parts, a multiple of 64 if there are several.
            is_last: whether it is the last piece of the operation.
        """
        size = HEADER + -(-stride * len(parts) // 64) * 64
        position, capacity = self._position, self._layout.capacity
        wraps = position + size > capacity
        skipped = capacity - position if wraps else 0
        if self._written + skipped + size - self._oldest(skipped + size) > capacity:
            return False
        buffer, start = self._memory.buffer, self._layout.start
        if wraps:
            if skipped:
                buffer[start + position : start + position + len(_WRAP)] = _WRAP
            position = 0
        offset = start + position
        buffer[offset : offset + HEADER] = signature + _place.pack(index | _LAST * is_last, stride)
        to = self._memory.address + offset + HEADER
        for address, length in parts:
            ctypes.memmove(to, address, length)
            to += stride
        self._position, self._written = position + size, self._written + skipped + size
        for filled, bell in self._posts:
            semaphores.post(filled)
            semaphores.post(bell)
        return True

    def slowest(self) -> list[int]:
        """The readers that have credited least."""
        return [reader for reader, credited in enumerate(self._credited) if credited == min(self._credited)]

    def _oldest(self, needed: int) -> int:
        """The number of bytes that every reader has credited; collects credit only if the ring is full otherwise."""
        oldest = min(self._credited)
        if self._written + needed - oldest <= self._layout.capacity:
            return oldest
        for reader, credit in enumerate(self._credits):
            while semaphores.take(credit):
                self._credited[reader] += self._layout.capacity // 4
        return min(self._credited)


class Reader:
    """The reading end of a ring in another process's memory.

    Args:
        memory: the writer's.
        layout: the ring.
        index: which of its readers this process is.
        bell: the address on which the writer sleeps.

    Attributes:
        memory: the writer's.
        largest: the most bytes of data in a piece.
    """

    def __init__(self, memory: Memory, layout: Layout, index: int, bell: int) -> None:
        self.memory, self._layout, self.largest = memory, layout, layout.largest
        self._filled, self._credit = memory.address + layout.filled(index), memory.address + layout.credit(index)
        self._bell = bell
        self._position = self._read = self._credited = 0
        self._has_piece = False

    def peek(self) -> int | None:
        """The offset of the next piece in the memory; None if there is none yet."""
        start = self._layout.start
        if not self._has_piece:
            if not semaphores.take(self._filled):
                return None
            self._has_piece = True
            left, at = self._layout.capacity - self._position, start + self._position
            if left == 0 or self.memory.buffer[at : at + len(_WRAP)] == _WRAP:
                self._read, self._position = self._read + left, 0
        return start + self._position

    def pop(self, length: int) -> None:
        """Release the piece that :meth:`peek` returned, with ``length`` bytes of data and padding between parts."""
        size = HEADER + -(-length // 64) * 64
        self._position, self._read, self._has_piece = self._position + size, self._read + size, False
        quarter = self._layout.capacity // 4
        while self._read - self._credited >= quarter:
            self._credited += quarter
            semaphores.post(self._credit)
            semaphores.post(self._bell)


class Piece(NamedTuple):
    """The place of a piece in its operation."""

    number: int
    is_last: bool
    stride: int


def piece_at(memory: Memory, offset: int) -> Piece:
    """Read the header at an offset."""
    index, stride = _place.unpack_from(memory.buffer, offset + SIGNATURE)
    return Piece(index & ~_LAST, index >= _LAST, stride)
