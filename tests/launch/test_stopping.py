"""Signals to the launcher reach the processes that it started, and no others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest

from megastack.launch.stopping import SIGNALS, StopForwarder, StoppedEarly
from megastack.training.signals import StopRequest

fork = multiprocessing.get_context("fork")


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


def test_a_signal_before_the_children_reaches_those_that_were_started_all_the_same():
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
