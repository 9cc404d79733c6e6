"""Steps on a test double of NCCL: the communicators that exist before the first one, and the time of waits."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import pytest
import torch

from megastack.assemble.data import read_dataset
from megastack.assemble.training import build_training
from megastack.comm.collectives import all_reduce
from megastack.comm.objects import all_gather_objects
from megastack.config.compose import compose
from megastack.config.schema import TrainConfig
from megastack.launch.run import on_ranks
from megastack.launch.worker import TaskFailed, connect_ranks
from megastack.mesh.mesh import Mesh
from tests import nccl_double

SMALL = ("experiment=parity", "model.layers=4", "model.hidden=16", "model.heads=2", "model.kv_groups=2", "model.ffn=32")
SMALL += ("batch.sequence_length=8", "batch.global_size=4", "batch.micro_size=1")
LAYOUTS = {
    "interleaved": ("parallel.pp=2", "schedule=interleaved", "schedule.chunks=2"),
    "pp4": ("parallel.pp=4", "model.tied=true"),
    "grid": ("parallel.dp=2", "parallel.tp=2", "parallel.pp=2"),
    "zero1": ("parallel.dp=2", "parallel.pp=2", "parallel.zero.stage=1"),
    "hybrid": ("parallel.dp=4", "parallel.zero.stage=1", "parallel.zero.shard_size=2"),
    "zero3": ("parallel.dp=2", "parallel.tp=2", "parallel.zero.stage=3"),
}
SLOW = set(LAYOUTS) - {"interleaved"}


def communicators(config: TrainConfig, mesh: Mesh, double: nccl_double.Double) -> list[tuple[set[Any], set[Any], int]]:
    """For each rank: the communicators created before a step, the communicators of the step, and the counted calls."""
    training = build_training(config, mesh, read_dataset(config))
    double.used.clear()
    mesh.ledger.reset()
    connect_ranks(logging.getLogger("megastack"), training)
    created, counted = set(double.used), mesh.ledger.total().calls
    double.used.clear()
    training.step(0)
    all_reduce(torch.zeros(1), mesh.world)  # the agreement after a step
    return all_gather_objects((created, set(double.used), counted), mesh.world)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in LAYOUTS])
def test_the_communicators_of_a_step_exist_before_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    double = nccl_double.install(monkeypatch, run_ahead_s=1.0)
    for created, used, counted in on_ranks("connect", compose([*SMALL, *LAYOUTS[name]]), communicators, double):
        assert created == used
        assert len(created) >= 2 and counted == 0


def stopped(config: TrainConfig, mesh: Mesh) -> None:
    """The last rank stops while the others connect."""
    training = build_training(config, mesh, read_dataset(config))
    if mesh.rank == mesh.shape.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    connect_ranks(logging.getLogger("megastack"), training)


@pytest.mark.full
def test_a_rank_that_stops_before_it_connects_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_double.install(monkeypatch)
    config = compose([*SMALL, *LAYOUTS["interleaved"], "launch.timeout_s=2", "launch.grace_s=0.5"])
    with pytest.raises(TaskFailed, match=r"\[rank 1 \| pp1 dp0 tp0\] did not arrive at pp all_reduce \d+ of \[1\]"):
        on_ranks("connect", config, stopped)


LATE_S = 0.3


def exposed(config: TrainConfig, mesh: Mesh) -> list[tuple[float, dict[str, float]]]:
    """For each rank: the seconds that its host spent in waits, and the exposed communication of a late all-reduce."""
    if mesh.rank == 1:
        time.sleep(LATE_S)
    began = time.monotonic()
    x = all_reduce(torch.ones(1), mesh.world)
    host_s, step = time.monotonic() - began, mesh.ledger.copy()
    mesh.ledger.reset()
    assert x.tolist() == [2.0]  # blocks until the device is there
    mesh.flight_recorder.settle()
    assert mesh.ledger.exposed_s == {}
    return all_gather_objects((host_s, step.exposed_s), mesh.world)


def test_the_time_that_a_stream_waits_for_a_late_rank_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_double.install(monkeypatch)
    early, late = on_ranks("exposed", compose([*SMALL, "parallel.dp=2"]), exposed)
    assert early[0] < LATE_S / 2 < early[1]["dp"], "the stream waits, the host does not"
    assert late[1]["dp"] < LATE_S / 2
