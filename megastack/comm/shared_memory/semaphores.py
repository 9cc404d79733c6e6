"""Semaphores in shared memory, from the C library.

A semaphore orders memory on every architecture: what a process wrote before it posts is visible to the process that
takes. They also block and wake without an implementation of our own. Linux only.
"""

from __future__ import annotations

import ctypes
import sys
import time


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# A wait releases Python's interpreter lock; the others do not block and keep it.
_quick, _blocking = ctypes.PyDLL(None), ctypes.CDLL(None, use_errno=True)
_NAMES = ("sem_init", "sem_post", "sem_trywait", "sem_timedwait")
AVAILABLE = sys.platform == "linux" and all(hasattr(_quick, name) for name in _NAMES)

if AVAILABLE:
    _init, post, _take = _quick.sem_init, _quick.sem_post, _quick.sem_trywait
    _init.argtypes, post.argtypes, _take.argtypes = (
        [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint],
        [ctypes.c_void_p],
        [ctypes.c_void_p],
    )
    _CLOCK = time.CLOCK_MONOTONIC if hasattr(_blocking, "sem_clockwait") else time.CLOCK_REALTIME
    if _CLOCK == time.CLOCK_MONOTONIC:  # glibc from 2.30 on
        _wait = _blocking.sem_clockwait
        _wait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]
    else:
        _wait = _blocking.sem_timedwait
        _wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]


def create(address: int) -> None:
    """Initialise a semaphore with 0, to be shared by processes."""
    assert _init(address, 1, 0) == 0, "sem_init failed"


def take(address: int) -> bool:
    """Decrement a semaphore unless it is 0."""
    return bool(_take(address) == 0)


def wait(address: int, seconds: float) -> bool:
    """Decrement a semaphore, waiting while it is 0; false after a time-out or a signal, whose handler has run."""
    until = time.clock_gettime(_CLOCK) + seconds
    limit = ctypes.byref(_Timespec(int(until), int(until % 1 * 1e9)))
    return bool((_wait(address, _CLOCK, limit) if _CLOCK == time.CLOCK_MONOTONIC else _wait(address, limit)) == 0)
