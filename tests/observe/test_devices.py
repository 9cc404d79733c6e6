"""Peak FLOP/s by device name, and the description of a rank's environment."""

from __future__ import annotations

import pytest
import torch

from megastack.observe.devices import (
    DeviceMemory,
    LargestMemory,
    describe_environment,
    device_memory,
    peak_flops,
    peak_flops_of,
)

NAMES = {
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A800-SXM4-80GB": 312,
    "NVIDIA A10": 125,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA L40": 181,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H20": 148,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2450,
    "NVIDIA GB300": 2500,
    "NVIDIA GeForce RTX 4090": 165,
    "AMD Instinct MI300X": 1307,
    "AMD Instinct MI250X": 191.5,
}


@pytest.mark.parametrize(("name", "tflops"), NAMES.items())
def test_the_peak_of_a_device_is_found_by_its_name(name: str, tflops: float) -> None:
    assert peak_flops_of(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1080", "NVIDIA A1000", "NVIDIA H2000", "", "Tesla K80"])
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops_of(name) is None


def test_mfu_is_known_for_16_bit_compute_on_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda", 0), "bf16") == 989e12
    assert peak_flops(torch.device("cuda", 0), "fp32") is None
    assert peak_flops(torch.device("cpu"), "bf16") is None


def test_memory_of_a_cpu_rank_is_its_resident_size() -> None:
    memory = device_memory(torch.device("cpu"))
    assert memory.allocated > 2**20 and memory.reserved is None and memory.total is None


def test_the_largest_memory_of_the_ranks_is_found_by_a_maximum_with_its_rank() -> None:
    """On 16,384 ranks with 2 TiB each, which a multiple of 512 bytes, the smallest block, tells apart."""
    ranks, most = 16384, 2**41
    sizes = {0: (most, 0), 7: (most + 512, 2**30), 16383: (2**20, 2**30 + 512)}
    parts = [LargestMemory.contribution(DeviceMemory(*size), rank, ranks) for rank, size in sizes.items()]
    maximum = torch.tensor(parts, dtype=torch.float64).amax(0).tolist()
    assert LargestMemory.of(maximum, ranks) == LargestMemory(most + 512, 7, 2**30 + 512, 16383)
    on_cpu = LargestMemory.contribution(DeviceMemory(1024), 3, 4)
    assert LargestMemory.of(on_cpu, 4) == LargestMemory(1024, 3, None, None)


def test_the_memory_of_a_gpu_rank_is_read_from_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.peak": 3, "reserved_bytes.all.peak": 5}
    properties = type("Properties", (), {"total_memory": 7})
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert device_memory(torch.device("cuda", 0)) == DeviceMemory(3, 5, 7)
    stats.clear()  # before the first allocation
    assert device_memory(torch.device("cuda", 0)) == DeviceMemory(0, 0, 7)


def test_the_environment_names_versions_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "never-shown")
    text = "\n".join(describe_environment(torch.device("cpu")))
    assert f"torch {torch.__version__}" in text and "NCCL_DEBUG=INFO" in text and "never-shown" not in text


class Properties:
    """The properties of a GPU that torch reports."""

    name, total_memory, major, minor, multi_processor_count, uuid = "NVIDIA L4", 24 * 2**30, 8, 9, 58, "GPU-1"


def test_the_environment_of_a_gpu_rank_describes_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    text = "\n".join(describe_environment(torch.device("cuda", 3)))
    assert "cuda:3 is NVIDIA L4, 24.0 GiB, compute capability 8.9" in text and "NCCL 2.27.5" in text
