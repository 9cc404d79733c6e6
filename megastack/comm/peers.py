"""Answers of ranks that do not exist: a dry run executes one rank of a job in one process, without its peers.

Tensors that such a rank receives have no values. The few values of peers that the host needs (gathered Python objects,
and the headers of pipeline messages) are asked of :class:`Peers` instead of the process group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from megastack.comm.group import AxisGroup

T = TypeVar("T")


class Peers(Protocol):
    """What the other ranks of a job would send."""

    def gathered(self, value: T, group: AxisGroup) -> list[T]:
        """The value of each rank of a group, in group order; ``value`` is this rank's."""

    def header(self, about: object) -> Any:
        """The header that precedes the tensors described by ``about``."""


_PEERS: ContextVar[Peers | None] = ContextVar("peers", default=None)


def absent_peers() -> Peers | None:
    """Return what answers for the other ranks; ``None`` if they exist."""
    return _PEERS.get()


@contextmanager
def answered_by(peers: Peers) -> Iterator[None]:
    """Context manager in which ``peers`` answers for all other ranks."""
    token = _PEERS.set(peers)
    try:
        yield
    finally:
        _PEERS.reset(token)
