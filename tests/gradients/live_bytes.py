"""Bytes of the storages that live on a rank, found through the garbage collector."""

from __future__ import annotations

import gc
import time

import torch
from torch import Tensor

_SMALL = 16384


def live_bytes() -> int:
    """The size of all storages on the CPU that Python can reach, except for small ones."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, torch.nn.Parameter)]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.device.type == "cpu"}
    return sum(size for size in storages.values() if size > _SMALL)


def settled_bytes(at_most: float, patience: float = 30) -> int:
    """:func:`live_bytes` as soon as it is within a limit, or at the end of ``patience`` seconds.

    A gloo thread frees the buffers of an operation some time after the operation was waited for: a few microseconds, or
    a scheduler time slice if all cores are busy. Storages that are really held are still there then.
    """
    end = time.monotonic() + patience
    while (held := live_bytes()) > at_most and time.monotonic() < end:
        time.sleep(0.01)
    return held
