"""Freed memory stays with a rank that computes on the host."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from megastack.launch.memory import keep_freed_memory
from megastack.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
BLOCKS, ELEMENTS = 20, 2**20


def _faults_of_a_microbatch() -> int:
    """Page faults while as many blocks of 4 MiB are filled and freed as a microbatch would, the third time."""
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(ELEMENTS) for _ in range(BLOCKS)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_microbatch_takes_no_new_pages_after_the_first() -> None:
    def faults(device: str) -> int:
        keep_freed_memory(torch.device(device))
        return _faults_of_a_microbatch()

    pages = BLOCKS * ELEMENTS * 4 // resource.getpagesize()
    (usual,) = run_ranks(lambda: faults("meta"), 1)
    (kept,) = run_ranks(lambda: faults("cpu"), 1)
    assert kept < 0.02 * pages < 0.5 * pages < usual
