"""run_ranks: results by rank, the first failure with its traceback, no hang, a pool that recovers."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

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


def raises_after_its_peers_failed(rank: int) -> None:
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
def test_results_are_ordered_by_rank(shape: tuple[int, int]) -> None:
    dp, tp = shape
    world = dp * tp
    expected = [(r // tp, r % tp, world * (world - 1) // 2) for r in range(world)]
    assert run_ranks(coordinates, world, dp, tp) == expected


def test_a_closure_runs_in_a_new_fork() -> None:
    offset = 40
    assert run_ranks(lambda: dist.get_rank() + offset, 2) == [40, 41]


def called(fn: Callable[[], Any]) -> tuple[int, Any]:
    return dist.get_rank(), fn()


def pid() -> int:
    return os.getpid()


def test_any_callable_may_be_an_argument_and_is_inherited_if_it_cannot_be_imported() -> None:
    class Local:
        def __call__(self) -> int:
            return 7

    lock = threading.Lock()  # cannot be pickled
    calls: list[Callable[[], Any]] = [lambda: 7, Local(), partial(lambda x: x, 7), lambda: 7 if lock else 0, seven]
    for fn in calls:
        assert run_ranks(called, 2, fn) == [(0, 7), (1, 7)]


def seven() -> int:
    return 7


def test_a_function_that_main_defined_after_the_pool_was_forked_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that was forked earlier does not have it."""
    assert run_ranks(called, 2, seven) == [(0, 7), (1, 7)]
    monkeypatch.setattr(sys.modules["__main__"], "eight", lambda: 8, raising=False)
    eight = sys.modules["__main__"].eight  # type: ignore[attr-defined]
    eight.__module__, eight.__qualname__ = "__main__", "eight"
    assert run_ranks(called, 2, eight) == [(0, 8), (1, 8)]


def test_plain_functions_and_arguments_share_a_standing_pool() -> None:
    assert run_ranks(pid, 2) == run_ranks(pid, 2)
    assert run_ranks(called, 2, pid) == run_ranks(called, 2, pid)


class Odd(Exception):
    """An exception that can be pickled but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raises_odd() -> None:
    raise Odd(1, 2)


def test_an_error_that_cannot_be_unpickled_is_reported_by_its_traceback() -> None:
    with pytest.raises(RankFailure, match="1 and 2") as caught:
        run_ranks(raises_odd, 1)
    assert caught.value.error is None


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="the result cannot be pickled"):
        run_ranks(threading.Lock, 1)


def test_the_first_failing_rank_is_named_with_its_traceback_and_the_pool_recovers() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed.*the bad one") as caught:
        run_ranks(raises_on, 3, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, ValueError)
    assert run_ranks(coordinates, 2, 1, 2)[1] == (0, 1, 1)


def test_a_primary_failure_is_named_before_secondary_ones() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 failed \(ranks \[0, 2\] failed after it\)[^$]*the bad one"):
        run_ranks(raises_after_its_peers_failed, 3, 1)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailure, match="exit code -9") as caught:
        run_ranks(killed_on, 3, 2)
    assert caught.value.rank == 2


def test_a_rank_that_times_out_is_killed() -> None:
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


def test_it_is_named_also_if_the_others_time_out_first() -> None:
    with pytest.raises(
        RankFailure, match=r"ranks \[1\]: did not return; ranks \[0, 2\] failed waiting for them"
    ) as caught:
        run_ranks(hangs_on, 3, 1, "sleep", 2, timeout=60)
    assert caught.value.rank == 1
