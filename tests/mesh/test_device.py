"""The device of a rank: how it is chosen, and that freed host memory is kept."""

from __future__ import annotations

import ctypes
import platform
import resource

import pytest
import torch

from megastack.errors import MeshError
from megastack.mesh import device as device_module
from megastack.mesh.device import keep_freed_memory, pick_device
from megastack.testing.ranks import run_ranks

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
BLOCKS, ELEMENTS = 20, 2**20


def _faults_of_a_microbatch() -> int:
    """Page faults while as many blocks of 4 MiB are filled and freed as a microbatch would, once the heap has grown."""
    found = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(ELEMENTS) for _ in range(BLOCKS)]
        del blocks
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found[2:])


def _before_and_after() -> tuple[int, int]:
    """With all that is freed given back at once, and with it kept."""
    library = ctypes.CDLL(None)
    library.mallopt(-1, 2**17)  # from here on the end of the heap is given back
    library.mallopt(-3, 2**17)  # and larger blocks are mapped one by one
    usual = _faults_of_a_microbatch()
    keep_freed_memory(torch.device("cpu"))
    return usual, _faults_of_a_microbatch()


@glibc
def test_a_microbatch_takes_no_new_pages_after_the_first() -> None:
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
