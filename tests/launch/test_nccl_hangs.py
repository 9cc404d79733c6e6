"""Hangs where a wait does not block the host: on a test double of NCCL, the rank that stopped is named."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megastack.comm.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from megastack.comm.p2p import P2PChannels
from megastack.config.compose import compose
from megastack.launch.run import on_ranks
from megastack.launch.worker import TaskFailed
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.observe.failure import read_failures
from megastack.observe.folder import RunFolder
from tests import nccl_double
from tests.faulty_mlp import FaultyMLP, fault
from tests.launch import fault_matrix
from tests.launch.test_external import CHAIN, join, slurm, torchrun
from tests.tiny_runs import overrides

AXES = {"dp": (Axis.DP,), "tp": (Axis.TP,), "pp": (Axis.PP,), "fused": (Axis.PP, Axis.TP)}
BESIDE_TP = {"dp": "dp", "tp": "pp", "pp": "pp", "fused": "pp"}
"""The degree that is 2 beside tp=2."""
COLLECTIVES = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
}
KINDS = (*COLLECTIVES, "send", "receive")
TIMEOUT_S, LIMIT_S = 2, 12
STOPPED, ROUNDS = 3, 4
GONE = "rank 2 ended or no longer responds"
HOW, P2P = ("SIGSTOP", "sleep"), ("lazy", "eager")


@dataclass(frozen=True)
class Cell:
    """A program of one kind of operation along an axis, in which rank 3 stops before an operation.

    Attributes:
        axis: among :data:`AXES`.
        kind: among :data:`KINDS`; for a message, what rank 3 does.
        how: how it stops.
        stops_in: the 0-based operation.
        p2p: how the double connects two ranks.
    """

    axis: str
    kind: str
    how: str
    stops_in: int
    p2p: str


def program(config: Any, mesh: Mesh, cell: Cell) -> None:
    """The program of a rank."""
    group, x = mesh[AXES[cell.axis]], torch.ones(2, 3)
    channels = P2PChannels(group, mesh.backward_channels if cell.axis == "pp" else None, mesh.device)
    for number in range(ROUNDS):
        if mesh.rank == STOPPED and number == cell.stops_in:
            channels.finish()
            x.tolist()  # what it has issued so far is done
            time.sleep(600) if cell.how == "sleep" else os.kill(os.getpid(), signal.SIGSTOP)
        if cell.kind in COLLECTIVES:
            x = x + COLLECTIVES[cell.kind](torch.ones(4, 2), group).sum()
        elif group.rank == (group.size - 1 if cell.kind == "send" else 0):
            channels.send([x], group.size - 1 - group.rank)
        elif group.rank in (0, group.size - 1):
            x = channels.receive((2, 3), x.dtype, group.size - 1 - group.rank).wait()
    channels.finish()
    x.tolist()


def run_cell(folder: Path, cell: Cell) -> tuple[list[str], float]:
    """The failure of a cell's program in lines, and the seconds it took."""
    limits = [f"launch.timeout_s={TIMEOUT_S}", "launch.grace_s=0.5"]
    degrees = [f"parallel.{BESIDE_TP[cell.axis]}=2", "parallel.tp=2", "batch.micro_size=1"]
    config = compose([*overrides(folder), *degrees, *limits])
    began = time.monotonic()
    with pytest.raises(TaskFailed) as caught:
        on_ranks("program", config, program, cell)
    return str(caught.value).splitlines(), time.monotonic() - began


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell) -> None:
    """Rank 3 is named with the operation that it did not reach, and a rank that waits for it with the same one."""
    nccl_double.install(monkeypatch, p2p=cell.p2p)
    lines, seconds = run_cell(folder, cell)
    own, other = {"send": ("send", "receive"), "receive": ("receive", "send")}.get(cell.kind, (cell.kind, cell.kind))
    number = cell.stops_in + 1
    assert re.match(rf"\[rank 3 \| .*\] did not arrive at \w+ {own} {number}\b.* launch\.timeout_s=2", lines[-1])
    assert any(re.match(rf"\[rank [012] .*waits for \w+ {other} {number}\b", line) for line in lines), lines
    assert seconds < LIMIT_S


CELLS = tuple(
    Cell(axis, kind, HOW[number % 2], number % 3, P2P[number // 2 % 2])
    for number, (axis, kind) in enumerate(itertools.product(AXES, KINDS))
)
SAMPLE = (Cell("tp", "all_reduce", "SIGSTOP", 1, "eager"), Cell("pp", "receive", "sleep", 0, "lazy"))


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_rank_that_stops_is_named_although_no_wait_blocks_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    check(tmp_path, monkeypatch, cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in SAMPLE], ids=str)
def test_a_rank_that_stops_is_named_on_every_axis_in_every_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Cell
) -> None:
    check(tmp_path, monkeypatch, cell)


TRAININGS = (
    ("sleep", "dp2-zero1", "backward"),
    ("sleep", "dp2-zero3", "backward"),
    ("sleep", "dp2-pp2", "step"),
    ("sleep", "tp4", "validation"),
    ("SIGSTOP", "pp3", "step"),
    ("SIGKILL", "dp3", "step"),
)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "phase"), TRAININGS)
def test_a_training_ends_as_it_does_with_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layout: str, phase: str
) -> None:
    nccl_double.install(monkeypatch, run_ahead_s=1.0)
    gc.collect()  # a forked launcher must not destroy the store of an earlier run
    cell = fault_matrix.Cell(kind, layout, 1, phase)
    assert fault_matrix.find_errors(tmp_path, cell, fault_matrix.run_cell(tmp_path, cell)) == []


@pytest.mark.full
def test_ranks_of_torchrun_name_the_rank_that_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks combine their reports before they end themselves."""
    nccl_double.install(monkeypatch, run_ahead_s=1.0, margin_s=20.0)
    assert join(tmp_path, torchrun, 3, *CHAIN, fault("stop"), stopped=2) == [1, 1, -signal.SIGKILL]
    screen = capfd.readouterr().err
    lines = screen.strip().splitlines()
    assert re.match(r"\[rank 1 \| pp1 dp0 tp0\] waits for pp receive \d+ of \[1, 16, 16\] from rank 2", lines[-2])
    lost = (
        r"\[rank 2 \| pp2 dp0 tp0\] did not arrive at pp send \d+ of \[1, 16, 16\] to rank 1 within launch.timeout_s=3"
    )
    assert re.fullmatch(lost, lines[-1]) and screen.count("did not arrive") == 1


@pytest.mark.full
def test_ranks_without_a_launcher_that_ends_them_name_a_killed_rank_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nccl_double.install(monkeypatch, run_ahead_s=0.05, margin_s=60.0)

    def die(layer: FaultyMLP) -> None:
        (tmp_path / "killed").write_text(str(time.time_ns()))
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(FaultyMLP, "fail", die)
    assert join(tmp_path, slurm, 3, *CHAIN, "launch.timeout_s=60", fault("kill")) == [1, 1, -signal.SIGKILL]
    killed, found = int((tmp_path / "killed").read_text()), read_failures(RunFolder(tmp_path / "run").failures)
    assert {record.rank: record.message for record in found} == {0: GONE, 1: GONE}
    assert all((record.time_ns - killed) / 1e9 < 2 for record in found)
    assert capfd.readouterr().err.strip().splitlines()[-1].startswith(f"[rank 2 | pp2 dp0 tp0] {GONE}")
