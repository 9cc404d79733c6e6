"""Which rings a group needs, and where they are in the memory of each member."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADER = 64
"""Bytes of the header of a piece."""
SEMAPHORE = 64
"""Bytes reserved for a semaphore, a cache line; the C library uses 32."""
PAGE = 4096
"""Bytes before the first ring of a member's memory."""
RING_BYTES = 4 * 2**20
SMALL_RING_BYTES = 2**20
MESSAGES_BYTES = 16 * 2**20
"""The most that a rank reserves for messages to all peers of a pipeline; each has at most ``RING_BYTES``."""


@dataclass(frozen=True)
class Layout:
    """The place of a ring in the memory of its writer.

    Attributes:
        offset: of its first byte, a multiple of 64.
        readers: how many processes read it.
        capacity: the bytes of pieces, a multiple of 512.
    """

    offset: int
    readers: int
    capacity: int

    @property
    def size(self) -> int:
        """Bytes in all."""
        return 2 * self.readers * SEMAPHORE + self.capacity

    @property
    def start(self) -> int:
        """Offset of the first piece."""
        return self.offset + 2 * self.readers * SEMAPHORE

    @property
    def largest(self) -> int:
        """The most bytes of data in a piece, a multiple of 64."""
        return self.capacity // 8 - HEADER

    def filled(self, reader: int) -> int:
        """Offset of the semaphore that counts the pieces for a reader."""
        return self.offset + 2 * reader * SEMAPHORE

    def credit(self, reader: int) -> int:
        """Offset of the semaphore that counts the quarters that a reader has read."""
        return self.filled(reader) + SEMAPHORE


@dataclass(frozen=True)
class GroupPlan:
    """A group that is to use shared memory.

    Attributes:
        axis: its label.
        ranks: the global ranks of its members.
        ring_bytes: for collectives.
        message_bytes: for messages to each peer; 0 if there are none.
    """

    axis: str
    ranks: tuple[int, ...]
    ring_bytes: int = RING_BYTES
    message_bytes: int = 0

    def layouts(self, offset: int) -> tuple[Layout, list[Layout]]:
        """The rings of a member from an offset in its memory: for collectives, and for messages to each peer."""
        ring = Layout(offset, len(self.ranks) - 1, self.ring_bytes)
        offset, messages = ring.offset + ring.size, []
        for _ in self.ranks[1:] if self.message_bytes else ():
            messages.append(Layout(offset, 1, self.message_bytes))
            offset += messages[-1].size
        return ring, messages

    @property
    def size(self) -> int:
        """The bytes that a member reserves, a multiple of 64."""
        ring, messages = self.layouts(0)
        return sum(each.size for each in (ring, *messages))


def message_bytes(peers: int) -> int:
    """The ring for messages to one of ``peers``."""
    return min(RING_BYTES, MESSAGES_BYTES // max(1, peers) // 512 * 512)


def reserved_bytes(groups: Sequence[GroupPlan]) -> int:
    """The shared memory that a member of these groups reserves."""
    return PAGE + sum(plan.size for plan in groups)
