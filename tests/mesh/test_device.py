"""The device of a rank: how it is chosen, and that freed host memory is kept."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megastack.errors import MeshError
from megastack.mesh import device as device_module
from megastack.mesh.device import (
    ALLOCATOR_VARIABLES,
    DeviceDescription,
    bind_to_cpus_near,
    count_gpus,
    find_device_error,
    keep_freed_memory,
    pick_device,
    set_allocator_defaults,
    use_deterministic_kernels,
)
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.mesh.store import check_devices
from megastack.testing.ranks import run_ranks

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
BLOCKS, ELEMENTS = 20, 2**20


def _faults_of_a_microbatch() -> int:
    """Page faults while blocks of 4 MiB are filled and freed as in a microbatch, once the heap has grown."""
    found = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(ELEMENTS) for _ in range(BLOCKS)]
        del blocks
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found[2:])


def _before_and_after() -> tuple[int, int]:
    """With freed memory returned at once, and with freed memory kept."""
    library = ctypes.CDLL(None)
    library.mallopt(-1, 2**17)  # from here on the end of the heap is given back
    library.mallopt(-3, 2**17)  # and larger blocks are mapped one by one
    usual = _faults_of_a_microbatch()
    keep_freed_memory(torch.device("cpu"))
    return usual, _faults_of_a_microbatch()


@glibc
def test_microbatches_after_the_first_need_no_new_pages() -> None:
    pages = BLOCKS * ELEMENTS * 4 // resource.getpagesize()
    ((usual, kept),) = run_ranks(lambda: _before_and_after(), 1)
    assert kept < 0.02 * pages < 0.5 * pages < usual


def test_a_forked_process_that_cannot_use_its_gpu_never_takes_the_cpu_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """In such a process the CUDA runtime reports no GPU."""
    monkeypatch.setattr(device_module, "is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("auto", "cuda"):
        with pytest.raises(MeshError, match=f"^device={name}: this process was forked from one that had called the"):
            pick_device(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")


def test_the_allocator_extends_its_segments_unless_the_user_has_configured_it() -> None:
    unset: dict[str, str] = {}
    set_allocator_defaults(unset)
    assert unset == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ALLOCATOR_VARIABLES:
        chosen = {name: "max_split_size_mb:64"}
        set_allocator_defaults(chosen)
        assert chosen == {name: "max_split_size_mb:64"}


def test_deterministic_kernels_are_switched_on_with_the_workspace_that_cublas_needs() -> None:
    environment: dict[str, str] = {}
    try:
        use_deterministic_kernels(environment)
        assert torch.are_deterministic_algorithms_enabled()
        assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_a_rank_without_a_gpu_cannot_be_bound_near_it() -> None:
    bind_to_cpus_near(torch.device("cpu"), "none")
    with pytest.raises(MeshError, match=r"launch\.numa_binding=node: this rank computes on the CPU"):
        bind_to_cpus_near(torch.device("cpu"), "node")


def test_a_rank_is_bound_to_the_cpus_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, str]] = []
    monkeypatch.setattr("megastack.mesh.device.bind_to_numa", lambda gpu, mode: bound.append((gpu, mode)))
    bind_to_cpus_near(torch.device("cuda", 3), "core_complex")
    assert bound == [(3, "core-complex")]


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process that sees two GPUs, and the ones that it makes current."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    return current


def test_a_gpu_with_an_index_becomes_the_current_device(selected: list[int]) -> None:
    for make in (Mesh.single, lambda name: Mesh.from_environment(MeshShape(), device=name)):
        assert make("cuda:1").device == torch.device("cuda", 1) and selected.pop() == 1
    assert Mesh.single("cuda").device == torch.device("cuda", 0) and selected == [0]


def test_a_rank_takes_the_gpu_of_its_place_on_the_machine(selected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda", 1) and selected.pop() == 1
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        MeshError, match=r"^device=auto: local rank 2 of this machine, which has 2 GPUs; use device=cpu"
    ):
        pick_device("auto")
    for make in (pick_device, Mesh.single):
        with pytest.raises(MeshError, match=r"^device=cuda:2: this process sees 2 GPUs; use cuda:0 to cuda:1$"):
            make("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MeshError, match=r"^device=cuda:0: this process sees 0 GPUs; use device=cpu$"):
        Mesh.single("cuda:0")


def test_gpus_are_counted_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML, torch would initialise CUDA in this one."""
    parent = os.getpid()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3 if os.getpid() != parent else 99)
    assert count_gpus() == 3
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert count_gpus() == 0


H100 = DeviceDescription("cuda, compute capability 9.0", "NVIDIA H100", "GPU-1")
T4 = DeviceDescription("cuda, compute capability 7.5", "Tesla T4", "GPU-2")


def test_ranks_must_have_gpus_of_one_kind_and_each_its_own() -> None:
    host = DeviceDescription.of(torch.device("cpu"))
    assert find_device_error([host, host]) is None
    assert find_device_error([H100, replace(H100, identity="GPU-3", name="NVIDIA H200")]) is None
    assert str(find_device_error([H100, T4])).startswith(
        "device: rank 0 uses NVIDIA H100 (cuda, compute capability 9.0) and rank 1 uses Tesla T4 (cuda, compute"
    )
    assert str(find_device_error([H100, host])).startswith("device: rank 0 uses NVIDIA H100 (cuda, compute capability")
    same = str(find_device_error([H100, replace(H100, identity="GPU-3"), H100]))
    assert same.startswith("device: ranks 0 and 2 use the same GPU, NVIDIA H100 GPU-1; start at most as many ranks")


def test_all_ranks_reject_the_same_devices_before_they_connect() -> None:
    store = dist.HashStore()

    def check(rank: int) -> str:
        with pytest.raises(MeshError) as caught:
            check_devices(store, rank, 2, H100, 20.0)
        return str(caught.value)

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(check, (0, 1))
    assert first == second and "ranks 0 and 1 use the same GPU" in first
