"""This rank's device: its peak FLOP/s, for the model FLOPs utilisation (MFU), and this process's peak memory."""

from __future__ import annotations

import resource
import sys

import torch

BF16_DENSE_TFLOPS = {"A100": 312, "H100": 989, "H800": 989, "H200": 989, "B200": 2250, "B300": 2250, "GB200": 2450}
"""Dense bf16 peaks in TFLOP/s as published by the vendors, by a substring of the device name."""


def peak_flops(device: torch.device, compute: str) -> float | None:
    """Return the peak FLOP/s of one device; ``None`` for unknown devices, for CPUs, and for compute above 16 bits."""
    if device.type != "cuda" or compute not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    for part in sorted(BF16_DENSE_TFLOPS, key=len, reverse=True):
        if part in name:
            return BF16_DENSE_TFLOPS[part] * 1e12
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process so far, in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
