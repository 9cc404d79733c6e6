"""No rank goes ahead before all ranks have been forked."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from megastack.config.compose import compose
from megastack.launch import local, ranks
from megastack.launch.start import NotStarted, StartLine
from megastack.mesh.mesh import Mesh
from tests.tiny_runs import overrides

fork = multiprocessing.get_context("fork")


def _arrive(line: StartLine, rank: int, told: Any) -> None:
    line.wait(rank)
    told.put(time.monotonic())


def test_ranks_leave_the_line_after_the_last_one_came() -> None:
    line, told = StartLine("fork", 3, 30), fork.SimpleQueue()
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
        StartLine("fork", 3, 0.05).wait(1)
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


def _entered(config: Any, mesh: Mesh) -> float:
    return time.monotonic()


def test_nor_does_one_of_a_generation(tmp_path: Path, last_fork: list[float]) -> None:
    config = compose([*overrides(tmp_path), "parallel.pp=2"])
    assert ranks.on_ranks(config, _entered) > last_fork[-1]
    assert len(last_fork) == 2
