"""On a test double of NCCL: before the first step, ranks create every communicator that it uses, and no other one."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megastack.assemble.data import read_dataset
from megastack.assemble.training import build_training
from megastack.comm.collectives import all_reduce
from megastack.comm.observer import RankObserver
from megastack.config.compose import compose
from megastack.config.layout_rules import mesh_shape
from megastack.launch import worker
from megastack.mesh.mesh import Mesh
from megastack.testing.ranks import run_ranks
from tests import nccl_double
from tests.launch import fault_matrix  # noqa: F401
from tests.tiny_runs import status, train

SMALL = ("experiment=parity", "model.layers=4", "model.hidden=16", "model.heads=2", "model.kv_groups=2", "model.ffn=32")
SMALL += ("batch.sequence_length=8", "batch.global_size=4", "batch.micro_size=1")
LAYOUTS = {
    "interleaved": ("parallel.pp=2", "schedule=interleaved", "schedule.chunks=2"),
    "pp4": ("parallel.pp=4", "model.tied=true"),
    "grid": ("parallel.dp=2", "parallel.tp=2", "parallel.pp=2"),
    "zero1": ("parallel.dp=2", "parallel.pp=2", "parallel.zero.stage=1"),
    "zero3": ("parallel.dp=2", "parallel.tp=2", "parallel.zero.stage=3"),
}
SLOW = {"pp4", "grid", "zero1", "zero3"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in LAYOUTS])
def test_the_communicators_of_a_step_exist_before_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    double = nccl_double.install(monkeypatch, run_ahead_s=1.0)
    config = compose([*SMALL, *LAYOUTS[name]])
    shape = mesh_shape(config)

    def communicators() -> tuple[set[Any], set[Any], int]:
        mesh = Mesh.from_environment(shape, device="cpu", timeout_s=60, observer=RankObserver())
        training = build_training(config, mesh, read_dataset(config))
        double.used.clear()
        worker.connect_ranks(logging.getLogger("megastack"), training)
        created, counted = set(double.used), mesh.ledger.total().calls
        double.used.clear()
        training.step(0)
        all_reduce(torch.zeros(1), mesh.world)  # the agreement after a step
        return created, set(double.used), counted

    for created, used, counted in run_ranks(communicators, shape.world_size):
        assert created == used
        assert len(created) >= 2 and counted == 0
