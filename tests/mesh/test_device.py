"""The device of a rank: how it is chosen, and that freed host memory is kept."""

from __future__ import annotations

import ctypes
import platform
import resource

import pytest
import torch

from megastack.errors import MeshError
from megastack.mesh import device as device_module
from megastack.mesh.device import (
    ALLOCATOR_VARIABLES,
    bind_to_cpus_near,
    keep_freed_memory,
    pick_device,
    set_allocator_defaults,
    use_deterministic_kernels,
)
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
    assert unset == dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:True")
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
