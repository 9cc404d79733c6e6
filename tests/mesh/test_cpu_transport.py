"""CPU ranks of one host communicate through shared memory by default, and through gloo where they cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megastack.comm.backend import Nccl, backend_choice
from megastack.comm.collectives import all_reduce
from megastack.comm.shared_memory import semaphores
from megastack.config.convert import replace_values
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.errors import MeshError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.compare import TOLERANCES, Trace, differences
from megastack.testing.ranks import RankFailure, run_ranks
from megastack.testing.training import _trace_on_rank, composed
from tests.tiny_runs import overrides

pytestmark = pytest.mark.skipif(not semaphores.AVAILABLE, reason="needs Linux")

TENSOR_OPERATIONS = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_to_all_single", "all_to_all", "isend", "irecv", "send", "recv", "batch_isend_irecv"),
)
LAYOUTS = {
    "dp2 tp2 pp2": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "model.tied=true"],
    "ZeRO 1": ["parallel.dp=2", "parallel.zero.stage=1", "parallel.pp=2"],
    "ZeRO 2": ["parallel.dp=2", "parallel.tp=2", "parallel.zero.stage=2"],
    "ZeRO 3": ["parallel.dp=4", "parallel.zero.stage=3", "parallel.zero.shard_size=2"],
}


def forbidden(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a tensor operation of torch.distributed")


def trained_without_gloo(config: TrainConfig) -> Trace | None:
    with patch.multiple(dist, **dict.fromkeys(TENSOR_OPERATIONS, forbidden)):
        return _trace_on_rank(config, 2, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tensor_goes_through_gloo(layout: str, tmp_path: Path) -> None:
    config = composed(overrides(tmp_path), ["precision=fp64", "batch.global_size=8"], LAYOUTS[layout])
    single = dict.fromkeys(("parallel.dp", "parallel.tp", "parallel.pp"), 1)
    one = replace_values(config, {**single, "parallel.zero.stage": 0, "parallel.zero.shard_size": None})
    expected = run_ranks(_trace_on_rank, 1, one, 2, None)[0]
    found = run_ranks(trained_without_gloo, mesh_shape(config).world_size, config)[0]
    assert expected is not None
    assert found is not None
    assert differences(expected, found, tolerance=TOLERANCES[torch.float64]) == []


def described(transport: str, full: bool) -> str:
    change: Any = patch.dict({})
    if full and dist.get_rank() == 1:
        change = patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with change:
        mesh = Mesh.from_environment(MeshShape(tp=2), device="cpu", cpu_transport=transport)
    assert all_reduce(torch.ones(2), mesh[Axis.TP]).tolist() == [2, 2]
    assert (mesh[Axis.TP].shared is None) == (full or transport == "gloo")
    return mesh.transport


@pytest.mark.parametrize(
    ("transport", "full", "text"),
    [
        ("auto", False, "shared memory for tp"),
        ("shared_memory", False, "shared memory for tp"),
        ("gloo", False, "gloo"),
        ("auto", True, "gloo for tp (rank 1: memory cannot be shared: [Errno 28] No space left on device)"),
    ],
)
def test_the_choice_is_described(transport: str, full: bool, text: str) -> None:
    assert run_ranks(described, 2, transport, full) == [text] * 2


def test_memory_that_cannot_be_shared_is_an_error_if_it_is_asked_for() -> None:
    text = (
        r"launch.cpu_transport=shared_memory: tp: rank 1: memory cannot be shared: \[Errno 28\] No space left on device"
        "; use auto or gloo"
    )
    with pytest.raises(RankFailure, match=text):
        run_ranks(described, 2, "shared_memory", True)


def test_the_variable_replaces_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(with_variable, 2, "gloo") == ["gloo"] * 2
    with pytest.raises(RankFailure, match="MEGASTACK_CPU_TRANSPORT=rdma: must be one of auto, shared_memory, gloo"):
        run_ranks(with_variable, 2, "rdma")


def with_variable(value: str) -> str:
    with patch.dict(os.environ, {"MEGASTACK_CPU_TRANSPORT": value}):
        return Mesh.from_environment(MeshShape(tp=2), device="cpu").transport


def on_a_gpu() -> None:
    with backend_choice(Nccl()):
        Mesh.from_environment(MeshShape(tp=2), device="cpu", cpu_transport="shared_memory")


def test_ranks_on_gpus_cannot_share_memory() -> None:
    with pytest.raises(RankFailure, match="cpu_transport=shared_memory: the ranks compute on cpu; use auto"):
        run_ranks(on_a_gpu, 2)
    with pytest.raises(MeshError, match="cpu_transport=rdma: must be one of auto, shared_memory, gloo"):
        Mesh.from_environment(MeshShape(), device="cpu", cpu_transport="rdma")


def of_a_subgroup() -> bool:
    mesh = Mesh.from_environment(MeshShape(pp=3), device="cpu")
    if mesh.coordinates[Axis.PP] == 1:
        return True
    ends = mesh.subgroup(Axis.PP, [0, 2])
    assert ends.shared is not None
    return all_reduce(torch.ones(1), ends).item() == 2


def test_groups_that_are_created_later_share_memory() -> None:
    assert run_ranks(of_a_subgroup, 3) == [True] * 3
