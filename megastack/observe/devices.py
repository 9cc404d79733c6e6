"""The device of a rank: its peak FLOP/s and memory, and the versions and settings that a failure report needs."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BF16_DENSE_TFLOPS = {
    "V100": 125,
    "T4": 65,
    "A10": 125,
    "A30": 165,
    "A40": 150,
    "A6000": 155,
    "A100": 312,
    "A800": 312,
    "L4": 121,
    "L40": 181,
    "L40S": 362,
    "RTX 3090": 71,
    "RTX 4090": 165,
    "RTX 5090": 210,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H800": 989,
    "H800 PCIe": 756,
    "H20": 148,
    "H200": 989,
    "H200 NVL": 835,
    "GH200": 989,
    "B200": 2250,
    "GB200": 2450,
    "B300": 2250,
    "GB300": 2500,
    "MI210": 181,
    "MI250": 362,
    "MI250X": 383,
    "MI300A": 981,
    "MI300X": 1307,
    "MI308X": 188,
    "MI325X": 1307,
    "MI350X": 2300,
    "MI355X": 2500,
}
"""Dense bf16 peaks with fp32 accumulation, in TFLOP/s as the vendors publish them, by words of the device name.

V100 and T4 have no bf16; theirs is the fp16 peak. An MI250 is two devices of half the published peak each.
"""
MEMORY_UNIT = 512
"""Bytes of which every size of a tensor is a multiple in torch's CUDA allocator, as is a resident size."""
_DIES = {"MI250": 2, "MI250X": 2}
REPORTED_VARIABLES = ("CUDA_", "NCCL_", "TORCH_", "PYTORCH_", "CUBLAS_", "OMP_", "GLOO_", "SLURM_JOB_ID", "FI_", "UCX_")
"""Prefixes of the environment variables that are written to the log."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device in bytes, since the start of the process.

    Attributes:
        allocated: the peak of allocated tensors; on a CPU the peak resident size of the process.
        reserved: the peak that torch's allocator reserved; ``None`` on a CPU.
        total: the memory of the device; ``None`` on a CPU.
    """

    allocated: int
    reserved: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.allocated / 2**30:.2f} GiB"]
        if self.reserved is not None and self.total is not None:
            parts += [f"{self.reserved / 2**30:.2f} GiB reserved", f"of {self.total / 2**30:.2f} GiB"]
        return f"peak memory {', '.join(parts)}"


@dataclass(frozen=True)
class LargestMemory:
    """The largest :class:`DeviceMemory` of all ranks, each value with its rank; see there for the values."""

    allocated: int
    allocated_rank: int
    reserved: int | None
    reserved_rank: int | None

    @staticmethod
    def contribution(memory: DeviceMemory, rank: int, ranks: int) -> tuple[float, float]:
        """This rank's part in a maximum over all ranks, from which :meth:`of` finds the values and their ranks.

        A size in units of :data:`MEMORY_UNIT` and the rank are packed into one number, which fp64 represents exactly:
        256 TiB on 16,384 ranks take 53 bits.
        """
        sizes = memory.allocated, memory.reserved or 0
        allocated, reserved = (float(size // MEMORY_UNIT * ranks + rank) for size in sizes)
        return allocated, reserved

    @classmethod
    def of(cls, maximum: Sequence[float], ranks: int) -> LargestMemory:
        """Inverse of :meth:`contribution`, after the maximum over all ranks."""
        (allocated, rank), (reserved, reserved_rank) = (divmod(int(value), ranks) for value in maximum)
        if reserved == 0:
            return cls(allocated * MEMORY_UNIT, rank, None, None)
        return cls(allocated * MEMORY_UNIT, rank, reserved * MEMORY_UNIT, reserved_rank)


def peak_flops(device: torch.device, compute: str) -> float | None:
    """Return the peak FLOP/s of one device; ``None`` for unknown devices, for CPUs, and for compute above 16 bits."""
    if device.type != "cuda" or compute not in ("bf16", "fp16"):
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Return the dense bf16 peak FLOP/s of a device with this name, such as ``NVIDIA H100 80GB HBM3``."""
    words = name.replace("-", " ").split()
    found = [model for model in BF16_DENSE_TFLOPS if _contains(words, model.split())]
    if not found:
        return None
    model = max(found, key=len)
    return BF16_DENSE_TFLOPS[model] * 1e12 / _DIES.get(model, 1)


def _contains(words: list[str], part: list[str]) -> bool:
    """Whether the words of ``part`` occur in this order, not necessarily adjacent."""
    rest = iter(words)
    return all(word in rest for word in part)


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the memory that this process has used on its device."""
    if device.type == "cuda":
        peaks, total = torch.cuda.memory_stats(device), torch.cuda.get_device_properties(device).total_memory
        allocated, reserved = (peaks.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved"))
        return DeviceMemory(allocated, reserved, total)
    unit = 1 if sys.platform == "darwin" else 1024
    return DeviceMemory(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and "DefaultCPUAllocator" in str(error)


def describe_environment(device: torch.device) -> list[str]:
    """Return what a report about this rank needs: host, versions, device and environment variables, a line each."""
    lines = [f"host {socket.gethostname()}, {platform.platform()}, Python {platform.python_version()}"]
    lines.append(f"torch {torch.__version__}{_cuda_versions() if device.type == 'cuda' else ''}")
    if device.type == "cuda":
        lines.append(_describe_gpu(device))
    named = sorted(name for name in os.environ if name.startswith(REPORTED_VARIABLES))
    return [*lines, "environment " + (" ".join(f"{name}={os.environ[name]}" for name in named) or "has no setting")]


def _cuda_versions() -> str:
    found = {"CUDA": torch.version.cuda, "HIP": torch.version.hip, "cuDNN": torch.backends.cudnn.version()}
    if torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return "".join(f", {name} {version}" for name, version in found.items() if version)


def _describe_gpu(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return (
        f"{device} is {found.name}, {found.total_memory / 2**30:.1f} GiB, compute capability "
        f"{found.major}.{found.minor}, {found.multi_processor_count} multiprocessors, uuid {found.uuid}"
    )
