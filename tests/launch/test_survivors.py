"""Processes that outlast a failure, stopped ones among them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

from megastack.launch.survivors import SurvivorKiller

fork = multiprocessing.get_context("fork")


def test_a_stopped_process_is_killed_after_the_grace_and_others_of_this_process_are_not() -> None:
    other = fork.Process(target=time.sleep, args=(60,))
    other.start()
    began = time.monotonic()
    with SurvivorKiller(1, lambda: time.monotonic() - began > 0.2, grace_s=0.3) as killer:
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
        with SurvivorKiller(1, lambda failed=failed: failed, grace_s=30 if failed else 0):
            child = fork.Process(target=time.sleep, args=(0.5,))
            child.start()
            child.join()
        assert child.exitcode == 0


def _find_in_a_child(ready: Any) -> None:
    """Names of a child's own children have two numbers."""
    with SurvivorKiller(2, lambda: False, grace_s=0) as killer:
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
