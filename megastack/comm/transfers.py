"""Copies between the host and the device that do not block the host.

CUDA copies from and to ordinary (pageable) memory only while the host waits. Copies through pinned memory are queued
like kernels. Torch's pinned-memory allocator does not reuse a block before the copies that were queued with it are
complete, so every transfer allocates its own block and none has to be kept.

On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to which each tensor of a packed copy is aligned; a multiple of every element size."""


class Event(Protocol):
    """A position in the device's queue."""

    def query(self) -> bool:
        """Whether the device has reached it."""

    def synchronize(self) -> None:
        """Block the host until the device has reached it."""


def pinned_bytes(size: int) -> Tensor:
    """Host memory of ``size`` bytes, uint8, pinned where there is a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def record_event() -> Event:
    """An event after everything that was issued to the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


def copy_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on ``device``, copied in one transfer that does not block; on the CPU the same tensors."""
    return list(tensors) if device.type == "cpu" else packed_copy(tensors, device, pinned_bytes)


def packed_copy(tensors: Sequence[Tensor], device: torch.device, allocate: Callable[[int], Tensor]) -> list[Tensor]:
    """Tensors of the host on ``device``, as views of one block that is copied at once.

    Args:
        tensors: tensors of any shapes and dtypes.
        device: where to copy them.
        allocate: returns host memory of a number of bytes, uint8.
    """
    sizes = [x.numel() * x.element_size() for x in tensors]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    host = allocate(starts[-1])
    for x, start, size in zip(tensors, starts, sizes, strict=False):
        host[start : start + size].view(x.dtype).view(x.shape).copy_(x)
    block = torch.empty(starts[-1], dtype=torch.uint8, device=device).copy_(host, non_blocking=True)
    return [
        block[start : start + size].view(x.dtype).view(x.shape)
        for x, start, size in zip(tensors, starts, sizes, strict=False)
    ]


def start_copy_to_host(
    x: Tensor, allocate: Callable[[int], Tensor] = pinned_bytes, record: Callable[[], Event] = record_event
) -> tuple[Tensor, Event | None]:
    """Start to copy a tensor to the host.

    Returns:
        The copy, and the event after which it may be read; on the CPU the tensor itself, which may be read at once.
    """
    if x.device.type == "cpu":
        return x, None
    host = allocate(x.numel() * x.element_size()).view(x.dtype).view(x.shape)
    host.copy_(x, non_blocking=True)
    return host, record() if x.device.type == "cuda" else None
