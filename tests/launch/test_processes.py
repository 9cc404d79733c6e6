"""Starting ranks, passing signals on to them, killing stragglers."""

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
from megastack.launch import local
from megastack.launch.processes import (
    SIGNALS,
    StopForwarder,
    StoppedEarly,
    StragglerKiller,
    agent,
    run_agent,
)
from megastack.launch.rendezvous import StartBarrier
from megastack.launch.run import on_ranks
from megastack.launch.worker import TaskFailed
from megastack.mesh import mesh as mesh_module
from megastack.mesh.mesh import Mesh
from megastack.training.signals import StopRequest
from tests.tiny_runs import overrides, status

fork = multiprocessing.get_context("fork")


@pytest.fixture
def last_fork(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which processes were started, slowly one after another."""
    started, start = list[float](), BaseProcess.start

    def slowly(self: BaseProcess) -> None:
        started.append(time.monotonic())
        start(self)
        time.sleep(0.3)

    monkeypatch.setattr(BaseProcess, "start", slowly)
    return started


def test_no_rank_of_a_training_connects_before_all_are_forked(
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


def test_a_rank_that_hangs_before_the_barrier_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wait = StartBarrier.wait

    def hangs(barrier: StartBarrier, rank: int) -> None:
        return time.sleep(600) if rank == 1 else wait(barrier, rank)

    monkeypatch.setattr(StartBarrier, "wait", hangs)
    more = ["parallel.dp=2", "batch.micro_size=1", "launch.timeout_s=2", "launch.grace_s=0.5"]
    assert local.launch(compose([*overrides(tmp_path), *more])).status == "failed"
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert last == "[rank 1 | pp0 dp1 tp0] rank 1 was not started within launch.timeout_s=2"
    assert status(tmp_path / "run")["rank"] == 1


def _entered(config: Any, mesh: Mesh) -> float:
    return time.monotonic()


def test_no_rank_of_a_task_connects_before_all_are_forked(tmp_path: Path, last_fork: list[float]) -> None:
    config = compose([*overrides(tmp_path), "parallel.pp=2"])
    assert on_ranks("sleep", config, _entered) > last_fork[-1]
    assert len(last_fork) == 2


@pytest.mark.parametrize("where", ["from_environment", pytest.param("_new_group", marks=pytest.mark.full)])
def test_a_rank_that_never_joins_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    """It stops before it connects, or while the groups are opened."""
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


def test_a_rank_that_sleeps_in_a_task_is_named(tmp_path: Path) -> None:
    config = compose([*overrides(tmp_path), "parallel.tp=2", "launch.timeout_s=4", "launch.grace_s=0.5"])
    began = time.monotonic()
    with pytest.raises(TaskFailed) as caught:
        on_ranks("sleep", config, _sleeps)
    assert time.monotonic() - began < 60
    lines = str(caught.value).splitlines()
    assert lines[0] == "[rank 0 | pp0 dp0 tp0] waits for tp all_reduce 1 of [3] in sleep"
    assert lines[-1] == "[rank 1 | pp0 dp0 tp1] did not arrive at tp all_reduce 1 of [3] within launch.timeout_s=4"


class _Garbage:
    """A reference cycle with a finalizer, as a store has, which needs the threads of the process that created it."""

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


def _wait(ready: Any, *, obey: bool) -> None:
    for name in SIGNALS:
        signal.signal(name, (lambda number, _: os._exit(number)) if obey else signal.SIG_IGN)
    ready.set()
    time.sleep(60)


def _started(*, obey: bool) -> Any:
    ready = fork.Event()
    child = fork.Process(target=_wait, args=(ready,), kwargs={"obey": obey})
    child.start()
    ready.wait()
    return child


@pytest.mark.parametrize("number", SIGNALS)
def test_any_signal_is_passed_on_to_the_children_of_the_context(number):
    other = _started(obey=True)
    before = signal.getsignal(signal.SIGHUP)
    with StopForwarder(grace_s=30) as stop:
        child = _started(obey=True)
        os.kill(os.getpid(), number)
        child.join()
    assert (child.exitcode, stop.received, stop.killed) == (number, number, False)
    assert other.is_alive() and signal.getsignal(signal.SIGHUP) is before
    other.kill()
    other.join()


@pytest.mark.parametrize("grace_s", [0, 30])
def test_children_that_do_not_listen_are_killed_after_the_grace_or_by_a_second_interrupt(grace_s):
    with StopForwarder(grace_s=grace_s) as stop:
        child = _started(obey=False)
        os.kill(os.getpid(), signal.SIGTERM)
        if grace_s:
            os.kill(os.getpid(), signal.SIGINT)
        child.join()
    assert child.exitcode == -signal.SIGKILL and stop.killed


def test_a_signal_without_children_keeps_them_from_being_started():
    with StopForwarder(grace_s=1) as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedEarly, match="received SIGTERM before the ranks started"):
            stop.check()


def test_a_signal_before_the_children_still_reaches_them():
    with StopForwarder(grace_s=30) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        child = _started(obey=True)
        child.join()
    assert (child.exitcode, stop.killed) == (signal.SIGTERM, False)


def test_a_hangup_that_is_ignored_stays_ignored_in_launcher_and_ranks():
    """As under nohup."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopForwarder(grace_s=30) as stop, StopRequest(None, SIGNALS) as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None and not request.code
        with StopRequest(None, SIGNALS) as request:
            os.kill(os.getpid(), signal.SIGTERM)
            assert request.code == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_hangup_with_the_terminal_gone_is_passed_on():
    """Nothing can be written to standard error."""
    kept, (reader, writer) = os.dup(2), os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    try:
        with StopForwarder(grace_s=30) as stop:
            child = _started(obey=True)
            os.kill(os.getpid(), signal.SIGHUP)
            child.join()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)
    assert (child.exitcode, stop.received) == (signal.SIGHUP, signal.SIGHUP)


def test_a_forked_child_ignores_the_handler_that_it_inherits():
    """Between the fork and its own handler, a rank must not act as the launcher."""
    with StopForwarder(grace_s=30) as stop:
        child = fork.Process(target=_signal_self)
        child.start()
        child.join()
    assert child.exitcode == 0 and stop.received is None


def _signal_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_hint_about_a_second_interrupt_follows_the_first(number, capfd):
    with StopForwarder(grace_s=30):
        child = _started(obey=True)
        os.kill(os.getpid(), number)
        child.join()
    printed = capfd.readouterr().err
    assert printed.startswith(f"{number.name}: ") and ("second SIGINT" in printed) is (number is signal.SIGINT)


def test_a_stopped_process_is_killed_after_the_grace_and_other_children_are_not() -> None:
    other = fork.Process(target=time.sleep, args=(60,))
    other.start()
    began = time.monotonic()
    with StragglerKiller(1, lambda: time.monotonic() - began > 0.2, grace_s=0.3) as killer:
        child = fork.Process(target=time.sleep, args=(60,))
        child.start()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        child.join(30)
    assert child.exitcode == -signal.SIGKILL and time.monotonic() - began > 0.5
    assert other.is_alive() and killer.exit_codes() == {0: -signal.SIGKILL}
    other.kill()
    other.join()


def test_nothing_is_killed_without_a_failure_or_when_all_end_within_the_grace() -> None:
    for failed in (False, True):
        with StragglerKiller(1, lambda failed=failed: failed, grace_s=30 if failed else 0):
            child = fork.Process(target=time.sleep, args=(0.5,))
            child.start()
            child.join()
        assert child.exitcode == 0


def test_a_process_that_dies_without_a_report_starts_the_grace_of_the_others() -> None:
    """As with NCCL, where the others wait for it."""
    ready = fork.Event()
    with StragglerKiller(2, lambda: False, grace_s=0.2) as killer:
        children = [fork.Process(target=_exit_when, args=(event, 3)) for event in (ready, fork.Event())]
        for child in children:
            child.start()
        time.sleep(0.5)
        ready.set()
        for child in children:
            child.join(30)
    assert killer.exit_codes() == {0: 3, 1: -signal.SIGKILL} and killer.killed == {1}


def _find_in_a_child(ready: Any) -> None:
    """Names of a child's own children have two numbers."""
    with StragglerKiller(2, lambda: False, grace_s=0) as killer:
        children = [fork.Process(target=_exit_when, args=(ready, code)) for code in (3, 4)]
        for child in children:
            child.start()
        time.sleep(1)
        ready.set()
        for child in children:
            child.join()
    os._exit(killer.exit_codes() == {0: 3, 1: 4})


def _exit_when(ready: Any, code: int) -> None:
    ready.wait()
    os._exit(code)


def test_processes_of_a_child_are_found_in_the_order_of_their_start() -> None:
    child = fork.Process(target=_find_in_a_child, args=(fork.Event(),))
    child.start()
    child.join()
    assert child.exitcode == 1
