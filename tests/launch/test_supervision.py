"""Heartbeats of ranks, and the end of a process whose exit hangs."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from megastack.comm import peer_failure
from megastack.comm.peer_failure import PeerMonitor
from megastack.config.compose import compose
from megastack.launch import supervision
from megastack.launch.supervision import release_device
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


LONG = {"period_s": 60.0, "silent_s": 120.0}
"""Periods with which heartbeats alone would show nothing in time."""


def _live(rank: int, port: int, ready: Any, lost: Any) -> None:
    """A rank of a job of four, which reports the rank that it finds lost. It has forked a process that lives on."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    with PeerMonitor(store, rank, 4, master="127.0.0.1", **LONG) as monitor:
        until(lambda: len(monitor._ring._links) == 2)
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        ready.send(rank)
        until(lambda: monitor.lost is not None)
        lost.send((rank, monitor.lost, time.monotonic()))


def test_a_killed_rank_is_found_at_once_by_all_although_processes_that_it_forked_live_on() -> None:
    fork = multiprocessing.get_context("fork")
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    (all_ready, ready), (all_lost, lost) = fork.Pipe(False), fork.Pipe(False)
    ranks = [fork.Process(target=_live, args=(rank, server.port, ready, lost), daemon=True) for rank in range(4)]
    for rank in ranks:
        rank.start()
    assert {all_ready.recv() for _ in ranks} == {0, 1, 2, 3}
    killed_at = time.monotonic()
    ranks[2].kill()
    found = [all_lost.recv() for _ in range(3)]
    assert {(rank, gone) for rank, gone, _ in found} == {(0, 2), (1, 2), (3, 2)}
    assert max(at for _, _, at in found) - killed_at < 2


def test_a_program_that_is_not_a_rank_may_connect_and_leave() -> None:
    store = dist.HashStore()
    with PeerMonitor(store, 0, 2, **LONG) as first, PeerMonitor(store, 1, 2, **LONG) as second:
        for monitor in (first, second):
            stranger = socket.create_connection(("127.0.0.1", monitor._ring._listener.getsockname()[1]))
            stranger.sendall(bytes(16))
            assert stranger.recv(1) == b""
            stranger.close()
        until(lambda: len(first._ring._links) == len(second._ring._links) == 2)
        assert first.lost is second.lost is None


def test_ranks_that_cannot_connect_rely_on_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = list[str]()

    def refuse(address: tuple[str, int], timeout: float) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(peer_failure, "_own_addresses", lambda master: ["127.0.0.1"])
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(peer_failure._LOG, "debug", lambda text, *values: notes.append(text % values))
    store = dist.HashStore()
    with PeerMonitor(store, 0, 3, **PERIODS) as first, PeerMonitor(store, 1, 3, **PERIODS) as second:
        until(lambda: bool(notes))
        until(lambda: first.lost == second.lost == 2)
    assert notes == ["rank 1 cannot be reached at ['127.0.0.1']; only its heartbeats are watched"]


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
