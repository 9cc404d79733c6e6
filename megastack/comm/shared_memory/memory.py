"""Memory that processes of one host share, and how each finds out that another has ended.

Memory has no name in any file system: a process creates it with ``memfd_create`` and others open it through
``/proc/PID/fd``. It is freed when the last process that maps it ends or drops it, however that process ends. Pages are
reserved when it is created, since a page that cannot be provided later is a SIGBUS.

Whether two processes are on the same host is not decided by host names: they compare the boot of the kernel and the
namespace of process numbers, open the memory, and read back a random token.

Each process holds a POSIX record lock on its endpoint. The kernel releases it when the process ends, forked children do
not inherit it, and other processes can query it. Closing any descriptor of the same memory would release it as well, so
the descriptor of an endpoint is never duplicated in its own process.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megastack.comm.shared_memory import semaphores
from megastack.comm.shared_memory.plan import PAGE

_TOKEN = 16
_CLOSED = 32
_BELL = 64
_LOCK = "hhqqi4x"
"""``struct flock`` of Linux on 64-bit machines: type, whence, start, length, owner."""
_F_GETLK = getattr(fcntl, "F_GETLK", 5)


@dataclass(frozen=True)
class Offer:
    """Where another process finds memory."""

    place: str
    pid: int
    descriptor: int
    size: int
    token: bytes


class Memory:
    """Shared memory, mapped into this process.

    Attributes:
        address: of the first byte.
        size: in bytes.
        buffer: the mapping.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.buffer = mmap.mmap(descriptor, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def elements(self, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        """A view of ``count`` elements, at least one, at an offset in bytes."""
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset)

    @property
    def is_closed(self) -> bool:
        """Whether its owner has closed it: it writes nothing more."""
        return self.buffer[_CLOSED] != 0


class OwnMemory(Memory):
    """Memory that this process created. When it is dropped, others see that nothing more will be written.

    Raises:
        OSError: it cannot be created or its pages cannot be reserved.
    """

    def __init__(self, name: str, size: int) -> None:
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._descriptor, 0, size)
            super().__init__(self._descriptor, size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._token = os.urandom(_TOKEN)
        self.buffer[:_TOKEN] = self._token
        self._closing = weakref.finalize(self, _close, self.buffer)
        self._closing.atexit = False  # at exit, what is still to be written comes first

    def offer(self) -> Offer:
        """Where other processes find it, until :meth:`seal`."""
        return Offer(_place(), os.getpid(), self._descriptor, self.size, self._token)

    def seal(self) -> None:
        """Close the descriptor: no further process can open it. Mappings remain."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def close(self) -> None:
        """Tell the other processes that this one writes nothing more."""
        self._closing()


def _close(buffer: mmap.mmap) -> None:
    buffer[_CLOSED] = 1


def open_memory(offer: Offer) -> tuple[Memory, int]:
    """Map the memory of another process; returns it with a descriptor, which the caller closes.

    Raises:
        OSError: it cannot be opened, or is not the memory that was offered.
    """
    if offer.place != _place():
        raise OSError("another host or container")
    descriptor = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != offer.size:
            raise OSError("other memory was found in its place")
        memory = Memory(descriptor, offer.size)
        if memory.buffer[:_TOKEN] != offer.token:
            raise OSError("other memory was found in its place")
    except BaseException:
        os.close(descriptor)
        raise
    return memory, descriptor


class Endpoint:
    """The semaphore on which this process sleeps, and the lock that shows that it runs. One for each process."""

    def __init__(self) -> None:
        self._memory = OwnMemory("megastack-endpoint", PAGE)
        self.bell = self._memory.address + _BELL
        semaphores.create(self.bell)
        self.pid = os.getpid()
        fcntl.lockf(self._memory._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)

    def offer(self) -> Offer:
        """Where other processes find it."""
        return self._memory.offer()


class PeerProcess:
    """Another process of this host.

    Attributes:
        bell: the address of the semaphore on which it sleeps.

    Raises:
        OSError: its endpoint cannot be opened, or its lock is not visible.
    """

    def __init__(self, endpoint: Offer) -> None:
        self._memory, self._descriptor = open_memory(endpoint)
        self.bell = self._memory.address + _BELL
        self.pid = endpoint.pid
        if not self.is_running():
            os.close(self._descriptor)
            raise OSError("record locks of other processes are not visible")

    def is_running(self) -> bool:
        """Whether it has not ended. A stopped process has not."""
        query = struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        kind = struct.unpack(_LOCK, fcntl.fcntl(self._descriptor, _F_GETLK, query))[0]
        return bool(kind != fcntl.F_UNLCK)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", -1)
        if descriptor >= 0:
            os.close(descriptor)


@dataclass(frozen=True)
class Peer:
    """Another rank: its process, and its memory in one mesh."""

    process: PeerProcess
    memory: Memory

    @staticmethod
    def find(endpoint: Offer, memory: Offer) -> Peer:
        """Map the memory of another rank.

        Raises:
            OSError: this is not possible.
        """
        process = _processes.get(endpoint.token)
        if process is None:
            process = _processes[endpoint.token] = PeerProcess(endpoint)
        mapped, descriptor = open_memory(memory)
        os.close(descriptor)
        return Peer(process, mapped)

    def may_write(self) -> bool:
        """Whether it may still write to its memory."""
        return not self.memory.is_closed and self.process.is_running()


_processes: weakref.WeakValueDictionary[bytes, PeerProcess] = weakref.WeakValueDictionary()
_endpoint: Endpoint | None = None


def endpoint() -> Endpoint:
    """The endpoint of this process; a forked child gets its own.

    Raises:
        OSError: it cannot be created.
    """
    global _endpoint
    if _endpoint is None or _endpoint.pid != os.getpid():
        _endpoint = Endpoint()
    return _endpoint


@cache
def _place() -> str:
    """The running kernel and the namespace of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
