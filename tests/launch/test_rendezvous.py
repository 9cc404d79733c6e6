"""Rendezvous: at the barrier of forked ranks, and in a store that earlier starts have used."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megastack.launch.rendezvous import NotStarted, StartBarrier, agree_on_name

fork = multiprocessing.get_context("fork")


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(
    server: dist.TCPStore, ranks: int, timeout_s: float = 20, absent: tuple[int, ...] = (), late: int | None = None
) -> list[str]:
    """The names that the ranks of a start agree on, each over its own connection."""

    def one(rank: int) -> str:
        time.sleep(0.5 if rank == late else 0)
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        return agree_on_name(client, rank, ranks, timeout_s)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, [rank for rank in range(ranks) if rank not in absent]))


def test_each_start_agrees_on_a_new_name(server: dist.TCPStore) -> None:
    starts = [meet(server, 3) for _ in range(3)]
    assert all(len(set(names)) == 1 for names in starts)
    assert len({names[0] for names in starts}) == 3


def test_a_rank_of_an_earlier_start_is_not_mistaken_for_its_successor(server: dist.TCPStore) -> None:
    server.set("megastack/shown/3/2", "a number from before")
    assert len(set(meet(server, 3, 8, late=2))) == 1


def test_ranks_that_do_not_join_are_named(server: dist.TCPStore) -> None:
    with pytest.raises(NotStarted, match=r"^ranks 1, 2 did not join within launch.timeout_s=0.3$") as caught:
        meet(server, 3, 0.3, absent=(1, 2))
    assert caught.value.ranks == (1, 2)


def _arrive(barrier: StartBarrier, rank: int, arrivals: Any) -> None:
    barrier.wait(rank)
    arrivals.put(time.monotonic())


def test_ranks_leave_the_barrier_after_the_last_one_arrives() -> None:
    barrier, arrivals = StartBarrier(3, 30), fork.SimpleQueue()
    children = [fork.Process(target=_arrive, args=(barrier, rank, arrivals)) for rank in range(3)]
    for child in children:
        last = time.monotonic()
        child.start()
        time.sleep(0.2)
    assert all(arrivals.get() > last for _ in children)
    for child in children:
        child.join()


def test_ranks_that_never_start_are_named() -> None:
    with pytest.raises(NotStarted, match=r"^ranks 0, 2 were not started within launch.timeout_s=0.05$") as caught:
        StartBarrier(3, 0.05).wait(1)
    assert caught.value.ranks == (0, 2)
