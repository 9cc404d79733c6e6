"""No rank goes ahead before all ranks have been forked."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from megastack.comm.collectives import all_reduce
from megastack.config.compose import compose
from megastack.launch import local, ranks
from megastack.launch.start import NotStarted, StartLine, agent, run_agent
from megastack.mesh import mesh as mesh_module
from megastack.mesh.mesh import Mesh
from tests.tiny_runs import overrides, status

fork = multiprocessing.get_context("fork")


def _arrive(line: StartLine, rank: int, told: Any) -> None:
    line.wait(rank)
    told.put(time.monotonic())


def test_ranks_leave_the_line_after_the_last_one_came() -> None:
    line, told = StartLine(3, 30), fork.SimpleQueue()
    children = [fork.Process(target=_arrive, args=(line, rank, told)) for rank in range(3)]
    for child in children:
        last = time.monotonic()
        child.start()
        time.sleep(0.2)
    assert all(told.get() > last for _ in children)
    for child in children:
        child.join()


def test_ranks_that_never_came_are_named() -> None:
    with pytest.raises(NotStarted, match=r"^ranks 0, 2 were not started within launch.timeout_s=0.05$") as caught:
        StartLine(3, 0.05).wait(1)
    assert caught.value.ranks == (0, 2)


@pytest.fixture
def last_fork(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When processes were started, slowly one after another."""
    started, start = list[float](), BaseProcess.start

    def slowly(self: BaseProcess) -> None:
        started.append(time.monotonic())
        start(self)
        time.sleep(0.3)

    monkeypatch.setattr(BaseProcess, "start", slowly)
    return started


def test_no_rank_of_a_training_looks_for_the_others_before_all_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_fork: list[float]
) -> None:
    opened = Mesh.from_environment

    def noted(shape: Any, **options: Any) -> Mesh:
        began = time.monotonic()
        mesh = opened(shape, **options)
        (tmp_path / str(mesh.rank)).write_text(repr(began))
        return mesh

    monkeypatch.setattr(Mesh, "from_environment", noted)
    config = compose([*overrides(tmp_path), "parallel.pp=2", "run.steps=1", "checkpoint.at_end=false"])
    assert local.launch(config).status == "completed"
    assert len(last_fork) == 2
    assert all(float((tmp_path / str(rank)).read_text()) > last_fork[-1] for rank in range(2))


def test_a_rank_that_hangs_before_the_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wait = StartLine.wait
    monkeypatch.setattr(StartLine, "wait", lambda line, rank: time.sleep(600) if rank == 1 else wait(line, rank))
    more = ["parallel.dp=2", "batch.micro_size=1", "launch.timeout_s=2", "launch.grace_s=0.5"]
    assert local.launch(compose([*overrides(tmp_path), *more])).status == "failed"
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last == "[rank 1 | pp0 dp1 tp0] rank 1 was not started within launch.timeout_s=2"
    assert status(tmp_path / "run")["rank"] == 1


def _entered(config: Any, mesh: Mesh) -> float:
    return time.monotonic()


def test_nor_does_one_of_a_generation(tmp_path: Path, last_fork: list[float]) -> None:
    config = compose([*overrides(tmp_path), "parallel.pp=2"])
    assert ranks.on_ranks(config, _entered) > last_fork[-1]
    assert len(last_fork) == 2


@pytest.mark.parametrize("where", ["from_environment", pytest.param("_new_group", marks=pytest.mark.full)])
def test_a_rank_that_never_joins_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    """It stops before it looks for the others, or while they open their groups."""
    owner = Mesh if where == "from_environment" else mesh_module
    real = getattr(owner, where)

    def stops(*arguments: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, where, stops)
    more = ["parallel.dp=2", "parallel.pp=2", "batch.micro_size=1", "launch.timeout_s=2", "launch.grace_s=0.5"]
    began = time.monotonic()
    assert local.launch(compose([*overrides(tmp_path), *more])).status == "failed"
    assert time.monotonic() - began < 10
    lines = capfd.readouterr().err.strip().splitlines()
    assert lines[-1] == "[rank 2 | pp1 dp0 tp0] did not join within launch.timeout_s=2"
    assert "[rank 0 | pp0 dp0 tp0] waits for all ranks to join" in lines
    ended = status(tmp_path / "run")
    assert (ended["rank"], ended["coordinates"]) == (2, "pp1 dp0 tp0") and ended["reason"].startswith("did not join")


def _sleeps(config: Any, mesh: Mesh) -> None:
    if mesh.rank == 1:
        time.sleep(600)
    all_reduce(torch.ones(3), mesh.world)


def test_a_rank_that_sleeps_in_a_generation_is_named(tmp_path: Path) -> None:
    config = compose([*overrides(tmp_path), "parallel.tp=2", "launch.timeout_s=4", "launch.grace_s=0.5"])
    began = time.monotonic()
    with pytest.raises(ranks.RanksFailed) as caught:
        ranks.on_ranks(config, _sleeps)
    assert time.monotonic() - began < 60
    lines = str(caught.value).splitlines()
    assert lines[0] == "[rank 0 | pp0 dp0 tp0] waits for tp all_reduce 1 of [3] in test_start"
    assert lines[-1] == "[rank 1 | pp0 dp0 tp1] did not arrive at tp all_reduce 1 of [3] within launch.timeout_s=4"


class _Garbage:
    """A cycle with a finalizer, as a store in use has one that needs the threads of the process that made it."""

    finalized = False

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        _Garbage.finalized = True


def _collect(left: list[_Garbage]) -> bool:
    left.clear()
    gc.collect()
    return _Garbage.finalized


def test_a_rank_never_destroys_what_its_parent_holds(tmp_path: Path) -> None:
    assert run_agent(agent(compose(overrides(tmp_path)), 1), _collect, [_Garbage()]) == {0: False}
