"""Kernels that only copy: sequence-parallel collectives of a microbatch of one sample pass views."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megastack.comm import backend
from megastack.layers.linear_ops import column_product, row_product
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks
from tests.gpu_branches import gpu_branches

COPIES = {"copy_", "cat", "stack", "clone"}


class CopyCounter(TorchDispatchMode):
    """Counts the kernels that copy a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in COPIES:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def copies(rows: int, sequence_parallel: bool) -> int:
    """Copies in the forward and backward of a column and a row product."""
    group = Mesh.from_environment(MeshShape(tp=2), device="cpu")[Axis.TP]
    x = torch.randn(rows, 4, 6, requires_grad=True)
    up, down = torch.randn(8, 6, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    with CopyCounter() as counter:
        (hidden,) = column_product(x, [up], [None], group, sequence_parallel=sequence_parallel)
        out = row_product(hidden, down, None, group, sequence_parallel=sequence_parallel)
        torch.autograd.grad(out, (x, up, down), torch.ones_like(out))  # autograd may copy what it accumulates
    return counter.found.total()


def counted(sequence_parallel: bool) -> list[int]:
    found = [copies(rows, sequence_parallel) for rows in (1, 2)]
    nothing = mock.Mock()  # gloo copies inside its reduce-scatter
    operations = mock.patch.multiple(backend, _all_gather=nothing, _reduce_scatter=nothing)
    with gpu_branches(), operations:
        return found + [copies(rows, sequence_parallel) for rows in (1, 2)]


@pytest.mark.parametrize(("sequence_parallel", "expected"), [(True, [3, 8, 0, 5]), (False, [0, 0, 0, 0])])
def test_copies_of_a_pair_of_products(sequence_parallel: bool, expected: list[int]) -> None:
    """For one and two samples on gloo, then on NCCL. Gloo writes this rank's shard into each of the three gathers."""
    assert run_ranks(counted, 2, sequence_parallel) == [expected] * 2
