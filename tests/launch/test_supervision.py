"""Heartbeats of ranks, and the end of a process whose exit hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megastack.config.compose import compose
from megastack.launch import supervision
from megastack.launch.supervision import PeerMonitor, release_device
from megastack.mesh.mesh import Mesh

PERIODS = {"period_s": 0.02, "silent_s": 0.4}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_rank_without_a_heartbeat_is_found_by_the_rank_before_it_and_told_to_all() -> None:
    store = dist.HashStore()
    with PeerMonitor(store, 0, 3, **PERIODS) as first, PeerMonitor(store, 1, 3, **PERIODS) as second:
        until(lambda: first.lost == second.lost == 2)
    assert first.describe() == "rank 2 ended or no longer responds"


def test_a_rank_that_is_done_is_not_missed_and_a_rank_that_failed_is_found_at_once() -> None:
    store = dist.HashStore()
    with PeerMonitor(store, 0, 2, **PERIODS) as first:
        with PeerMonitor(store, 1, 2, **PERIODS):
            time.sleep(0.1)
        time.sleep(0.6)
        assert first.lost is None
    store = dist.HashStore()
    with PeerMonitor(store, 0, 2, period_s=0.02, silent_s=60.0) as first:
        with pytest.raises(ValueError), PeerMonitor(store, 1, 2, **PERIODS):
            raise ValueError
        until(lambda: first.lost == 1)


def test_a_store_that_is_gone_means_that_rank_0_is() -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, is_master=False)
    with PeerMonitor(client, 1, 2, period_s=0.02, silent_s=60.0) as monitor:
        time.sleep(0.1)
        assert monitor.lost is None
        del server
        until(lambda: monitor.lost == 0)


HANGS = """
import time
from megastack.launch.supervision import exit_within

class Group:
    def __del__(self):
        while True:
            pass

exit_within(0.3)
group = Group()
"""


@pytest.mark.full
def test_an_exit_that_hangs_in_a_destructor_is_ended() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], timeout=60, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "Timeout" in ended.stderr


def test_groups_are_aborted_after_a_failure_unless_a_wait_blocks_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        aborted = 0

        def abort(self) -> None:
            Group.aborted += 1
            raise RuntimeError("not supported")

    exits = list[float]()
    monkeypatch.setattr(supervision, "process_groups", lambda: [Group(), Group()])
    monkeypatch.setattr(supervision, "exit_within", exits.append)
    mesh, config = Mesh.single(), compose(["experiment=parity", "launch.grace_s=7"])
    release_device(mesh, config)
    release_device(None, config)
    assert (Group.aborted, exits) == (0, [])
    monkeypatch.setattr(supervision, "backend_of", lambda device: type("Backend", (), {"wait_blocks_host": False}))
    release_device(mesh, config)
    assert (Group.aborted, exits) == (2, [7])
