"""Memory of a rank on the host: freed tensors stay with the process, for the next microbatch needs the same again.

The C library gives what is free at the end of its heap back to the system, and maps large blocks anew each time. A step
allocates and frees the same activations once a microbatch, so every page would be taken away and come back zeroed: for
a small model 5 % of the CPU time.
"""

from __future__ import annotations

import ctypes
import platform

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameters of ``mallopt`` (glibc's ``malloc.h``)."""
_NEVER = 2**31 - 1
_LARGEST_ON_THE_HEAP = 32 * 2**20
"""The most that glibc lets be asked for; larger blocks are mapped one by one."""


def keep_freed_memory(device: torch.device) -> None:
    """Let a rank that computes on the CPU keep the memory it freed; nothing elsewhere or with another C library."""
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_ON_THE_HEAP)
    library.mallopt(_TOP_PAD, _LARGEST_ON_THE_HEAP)
