"""run_ranks: results by rank, the first failure with its own traceback, no hang, a pool that recovers."""

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megastack.comm.collectives import all_reduce
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import RankFailure, run_ranks


def coordinates(dp: int, tp: int) -> tuple[int, int, int]:
    mesh = Mesh.from_environment(MeshShape(dp=dp, tp=tp))
    total = torch.tensor(float(mesh.rank))
    if mesh.world.size > 1:
        dist.all_reduce(total)
    return mesh.coordinates[Axis.DP], mesh.coordinates[Axis.TP], int(total)


def raises_on(rank: int) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=3))
    if mesh.rank == rank:
        raise ValueError("the bad one")
    dist.barrier()


def killed_on(rank: int) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=3))
    if mesh.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def raises_behind_its_peers(rank: int) -> None:
    dist.barrier()
    if dist.get_rank() == rank:
        dist.destroy_process_group()  # now the others cannot reach it
        time.sleep(0.5)
        raise ValueError("the bad one")
    dist.barrier()


def sleeps_on(rank: int) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    if mesh.rank == rank:
        time.sleep(60)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 4)])
def test_every_rank_returns_what_it_saw(shape: tuple[int, int]) -> None:
    dp, tp = shape
    world = dp * tp
    expected = [(r // tp, r % tp, world * (world - 1) // 2) for r in range(world)]
    assert run_ranks(coordinates, world, dp, tp) == expected


def test_a_closure_runs_in_a_fresh_fork() -> None:
    offset = 40
    assert run_ranks(lambda: dist.get_rank() + offset, 2) == [40, 41]


def test_the_first_failing_rank_is_named_with_its_traceback_and_the_pool_recovers() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed.*the bad one") as caught:
        run_ranks(raises_on, 3, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ValueError)
    assert run_ranks(coordinates, 2, 1, 2)[1] == (0, 1, 1)


def test_a_rank_is_named_before_those_that_only_miss_it() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 failed \(ranks \[0, 2\] failed after it\)[^$]*the bad one"):
        run_ranks(raises_behind_its_peers, 3, 1)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailure, match="exit code -9") as caught:
        run_ranks(killed_on, 3, 2)
    assert caught.value.rank == 2


def test_a_late_rank_is_killed_at_the_time_out() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"ranks \[0\]: no result within 4 s"):
        run_ranks(sleeps_on, 2, 0, timeout=4)
    assert time.monotonic() - start < 30


def hangs_on(rank: int, how: str, timeout_s: float) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=3), timeout_s=timeout_s)
    if mesh.rank == rank and how == "sleep":
        time.sleep(600)
    while mesh.rank == rank and how == "loop":
        pass
    if mesh.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce(torch.ones(1), mesh.world)


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("sleep", r"is at .*test_ranks.py:\d+ in hangs_on"),
        ("loop", "is at .*in hangs_on"),
        ("stop", "does not respond"),
    ],
)
def test_the_rank_that_others_wait_for_is_named(how: str, place: str) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(hangs_on, 3, 1, how, 60, timeout=3)
    first, *places = str(caught.value).splitlines()
    assert first == "ranks [1]: no result within 3 s; all ranks were killed" and caught.value.rank == 1
    assert re.match("rank 0 waits for other ranks at .*in wait", places[0]) and re.match(f"rank 1 {place}", places[1])


def test_it_is_named_where_the_wait_of_the_others_ends_first() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[1\]: did not return; ranks \[0, 2\] missed it") as caught:
        run_ranks(hangs_on, 3, 1, "sleep", 2, timeout=60)
    assert caught.value.rank == 1
