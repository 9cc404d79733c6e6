"""Peak rates of known devices, for the model FLOPs utilisation; unknown devices have none."""

from __future__ import annotations

import torch

BF16_DENSE_TFLOPS = {"A100": 312, "H100": 989, "H800": 989, "H200": 989, "B200": 2250, "B300": 2250, "GB200": 2450}
"""Vendors' dense bf16 rates in TFLOP/s by a part of the device's name, longer names first where one holds another."""


def peak_flops(device: torch.device, compute: str) -> float | None:
    """FLOP/s of one device, or ``None`` where no honest number is known (every CPU, and compute above 16 bits)."""
    if device.type != "cuda" or compute not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    for part in sorted(BF16_DENSE_TFLOPS, key=len, reverse=True):
        if part in name:
            return BF16_DENSE_TFLOPS[part] * 1e12
    return None
