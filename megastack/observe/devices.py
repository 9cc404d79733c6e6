"""This rank's device: its peak rate, for the model FLOPs utilisation, and the peak memory of this process."""

from __future__ import annotations

import resource
import sys

import torch

BF16_DENSE_TFLOPS = {"A100": 312, "H100": 989, "H800": 989, "H200": 989, "B200": 2250, "B300": 2250, "GB200": 2450}
"""Vendors' dense bf16 rates in TFLOP/s, by a substring of the device name."""


def peak_flops(device: torch.device, compute: str) -> float | None:
    """FLOP/s of one device; ``None`` for an unknown device, for CPUs, and for compute above 16 bits."""
    if device.type != "cuda" or compute not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    for part in sorted(BF16_DENSE_TFLOPS, key=len, reverse=True):
        if part in name:
            return BF16_DENSE_TFLOPS[part] * 1e12
    return None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process so far, in bytes: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
