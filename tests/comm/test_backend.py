"""Backends: which one a device gets, and that gloo's collectives give what torch's own do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megastack.comm.backend import Gloo, Nccl, backend_of
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks


def test_the_backend_follows_the_device() -> None:
    host, gpu = backend_of(torch.device("cpu")), backend_of(torch.device("cuda", 1))
    assert isinstance(host, Gloo) and isinstance(gpu, Nccl)
    assert (host.process_groups, gpu.process_groups) == ("gloo", "cpu:gloo,cuda:nccl")
    assert host.wait_blocks_host and not gpu.wait_blocks_host
    assert gpu.receive_lead == 0, "operations of a pair of ranks run in the order in which they were started"


def both() -> tuple[list[float], list[float], list[float], list[float]]:
    group = Mesh.from_environment(MeshShape(tp=3), device="cpu")[Axis.TP]
    pieces = torch.zeros(3, 4, dtype=torch.float64)
    pieces[group.rank] = torch.arange(4.0) + group.rank
    plain = torch.empty(12, dtype=torch.float64)
    dist.all_gather_into_tensor(plain, pieces[group.rank].clone(), group=group.group)
    gloo = Gloo()
    gloo.start_gather_(pieces, group).wait()
    addends = torch.arange(12.0, dtype=torch.float64).view(3, 2, 2) * (1 + group.rank)
    summed = torch.empty(2, 2, dtype=torch.float64)
    work, finish = gloo.start_sum(summed, addends, group)
    work.wait()
    assert finish() is summed
    dist.all_reduce(addends, group=group.group)
    return pieces.flatten().tolist(), plain.tolist(), summed.flatten().tolist(), addends[group.rank].flatten().tolist()


def test_gloo_gathers_and_sums_as_torch_does() -> None:
    for gathered, plain, summed, reduced in run_ranks(both, 3):
        assert gathered == plain and summed == reduced
