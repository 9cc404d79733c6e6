"""Signals to the launcher reach the processes that it started, and no others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from megastack.launch.local import told_why
from megastack.launch.stopping import StopForwarder, StoppedEarly
from megastack.observe.status import read_status, write_status
from megastack.training.state import RunResult

fork = multiprocessing.get_context("fork")


def _wait(ready: Any, *, obey: bool) -> None:
    signal.signal(signal.SIGTERM, (lambda *_: os._exit(7)) if obey else signal.SIG_IGN)
    ready.set()
    time.sleep(60)


def _started(*, obey: bool) -> Any:
    ready = fork.Event()
    child = fork.Process(target=_wait, args=(ready,), kwargs={"obey": obey})
    child.start()
    ready.wait()
    return child


def test_any_signal_asks_the_children_of_the_context_by_sigterm():
    other = _started(obey=True)
    before = signal.getsignal(signal.SIGHUP)
    with StopForwarder(grace_s=30) as stop:
        child = _started(obey=True)
        os.kill(os.getpid(), signal.SIGHUP)
        child.join()
    assert (child.exitcode, stop.received, stop.killed) == (7, signal.SIGHUP, False)
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


def test_a_signal_without_children_is_raised():
    with pytest.raises(StoppedEarly, match="SIGTERM before"), StopForwarder(grace_s=1):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_forked_child_keeps_quiet_about_the_handler_it_inherits():
    """Between the fork and its own handler a rank must not take the launcher's part."""
    with StopForwarder(grace_s=30) as stop:
        child = fork.Process(target=_signal_self)
        child.start()
        child.join()
    assert child.exitcode == 0 and stop.received is None


def _signal_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_hint_about_a_second_interrupt_stands_behind_a_first(number, capfd):
    with StopForwarder(grace_s=30):
        child = _started(obey=True)
        os.kill(os.getpid(), number)
        child.join()
    said = capfd.readouterr().err
    assert said.startswith(f"{number.name}: ") and ("second SIGINT" in said) is (number is signal.SIGINT)


def test_the_reason_is_the_signal_that_came_and_not_the_one_that_was_passed_on(tmp_path):
    write_status(tmp_path / "status.json", "preempted", step=3, reason="received SIGTERM")
    result = RunResult("preempted", 3, None, tmp_path, "received SIGTERM")
    stop = StopForwarder(grace_s=1)
    for received, reason in ((None, "received SIGTERM"), (signal.SIGINT, "received SIGINT")):
        stop.received = received
        assert told_why(result, stop).reason == reason
        status = read_status(tmp_path / "status.json")
        assert (status["reason"], status["step"], status["exit_code"]) == (reason, 3, 75)
