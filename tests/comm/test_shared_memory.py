"""The shared-memory transport: bits, order, backlog, faults and clean-up, without a mesh."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megastack.comm.shared_memory import memory, semaphores
from megastack.comm.shared_memory.connect import connect
from megastack.comm.shared_memory.group import SPLIT_BYTES, SharedGroup
from megastack.comm.shared_memory.plan import GroupPlan
from megastack.testing.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.skipif(not semaphores.AVAILABLE, reason="needs Linux")

RING = 2**16
PIECE = RING // 8 - 64
"""Bytes of data in the largest piece."""
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KINDS = ("all_reduce", "max", "min", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "message")


def exchange(value: Any) -> dict[int, Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return dict(enumerate(values))


def plan(*ranks: int, ring: int = RING) -> GroupPlan:
    return GroupPlan("tp", ranks or tuple(range(dist.get_world_size())), ring, message_bytes=ring)


def join(*plans: GroupPlan, timeout_s: float = 30) -> list[SharedGroup]:
    found = connect(plans or [plan()], dist.get_rank(), exchange, timeout_s)
    assert all(isinstance(group, SharedGroup) for group in found), found
    return found  # type: ignore[return-value]


def values(rank: int, count: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return (torch.randn(count, generator=generator) * 8).to(dtype)


def reduced(pieces: Sequence[Tensor], reduction: str = "sum") -> Tensor:
    """One process, in rank order; 16-bit numbers in fp32, rounded once."""
    function = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[reduction]
    total = pieces[0].float() if pieces[0].is_floating_point() and pieces[0].itemsize < 4 else pieces[0]
    for piece in pieces[1:]:
        total = function(total, piece.to(total.dtype))
    return total.to(pieces[0].dtype)


def start(group: SharedGroup, kind: str, count: int, dtype: torch.dtype, salt: int) -> tuple[Any, Callable[[], None]]:
    """Start an operation; returns its work and a check of its result."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = values(rank, count, dtype, salt)
    everyone = [values(r, count, dtype, salt) for r in range(size)]

    def equals(found: Tensor, expected: Tensor) -> Callable[[], None]:
        def check() -> None:
            assert torch.equal(found, expected), (kind, count, dtype)

        return check

    if kind in ("all_reduce", "max", "min"):
        reduction = "sum" if kind == "all_reduce" else kind
        return group.all_reduce(mine, reduction), equals(mine, reduced(everyone, reduction))
    if kind == "all_gather":
        pieces = torch.empty(size, count, dtype=dtype)
        return group.all_gather(pieces, mine), equals(pieces, torch.stack(everyone))
    if kind == "broadcast":
        return group.broadcast(mine, size - 1), equals(mine, everyone[-1])
    if kind == "reduce_scatter":
        tables = [values(r, count * size, dtype, salt).view(size, count) for r in range(size)]
        out = tables[rank][rank] if salt % 2 else torch.empty(count, dtype=dtype)
        expected = reduced([table[rank].clone() for table in tables])
        return group.reduce_scatter(out, tables[rank]), equals(out, expected)
    if kind == "all_to_all":

        def part(source: int, destination: int) -> Tensor:
            length = (3 * source + 5 * destination + count // 3) % (count + 1)
            return everyone[source][:length] if destination % 2 else everyone[source][count - length :].clone()

        out_parts = [torch.empty_like(part(r, rank)) for r in range(size)]
        expected = torch.cat([part(r, rank) for r in range(size)])
        work = group.all_to_all(out_parts, [part(rank, r) for r in range(size)])
        return work, lambda: equals(torch.cat(out_parts), expected)()
    received, after = torch.empty(count, dtype=dtype), (rank + 1) % size
    sending, receiving = group.send(mine, after), group.receive(received, (rank - 1) % size)

    class Both:
        def wait(self) -> None:
            receiving.wait()
            sending.wait()

    return Both(), equals(received, everyone[rank - 1])


def run_cases(cases: Sequence[tuple[str, int, torch.dtype]], outstanding: int, ring: int = RING) -> bool:
    """Run operations, at most so many at once, on two groups of the same ranks; finish them in any order."""
    groups, shuffle, started = join(plan(ring=ring), plan(ring=ring)), random.Random(dist.get_rank()), []
    for salt, (kind, count, dtype) in enumerate(cases):
        started.append(start(groups[salt % 2], kind, count, dtype, salt))
        if shuffle.random() < 0.05:
            time.sleep(shuffle.random() / 100)
        if len(started) == outstanding:
            shuffle.shuffle(started)
            for work, check in started:
                work.wait()
                check()
            started.clear()
    for work, check in started:
        work.wait()
        check()
    return True


def counts(dtype: torch.dtype, size: int) -> list[int]:
    """None, one element, around a piece, around the size from which all-reduces are split, many pieces."""
    edge, split = PIECE // dtype.itemsize, SPLIT_BYTES // dtype.itemsize
    return [0, 1, edge - 1, edge, edge + 1, split - 1, split + size - 1, 3 * RING // dtype.itemsize + 5]


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_equals_one_process_that_adds_in_rank_order(size: int) -> None:
    pairs = [
        (kind, dtype) for i, kind in enumerate(KINDS) for dtype in (FLOATS[i % 4], FLOATS[(i + 1) % 4], INTEGERS[i % 4])
    ]
    cases = [(kind, count, dtype) for i, (kind, dtype) in enumerate(pairs) for count in counts(dtype, size)[i % 2 :: 2]]
    assert run_ranks(run_cases, size, cases, 9) == [True] * size


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("outstanding", [1, 40])
def test_every_operation_dtype_and_size(size: int, outstanding: int) -> None:
    pairs = itertools.product(KINDS, (*INTEGERS, *FLOATS))
    cases = [(kind, count, dtype) for kind, dtype in pairs for count in counts(dtype, size)]
    random.Random(0).shuffle(cases)
    assert run_ranks(run_cases, size, cases, outstanding, timeout=600) == [True] * size


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_tensors_of_64_mib(size: int) -> None:
    cases = [(kind, 2**24 // (size if kind == "reduce_scatter" else 1), torch.float32) for kind in KINDS]
    assert run_ranks(run_cases, size, cases, 3, 2**22, timeout=600) == [True] * size


def hold(elements: int) -> bool:
    """Rank 0 blocks elsewhere while rank 1 needs its data: in a barrier of gloo, in another group's wait, asleep."""
    one, other = join(plan(), plan())
    for blocked in (dist.barrier, lambda: other.all_reduce(torch.ones(3)).wait(), lambda: time.sleep(1)):
        x, y = (torch.full((elements,), 1.0 + dist.get_rank()) for _ in range(2))
        first, second = one.all_reduce(x), one.all_reduce(y)
        message = torch.full((elements,), 7.0)
        sent = one.send(message, 1) if dist.get_rank() == 0 else one.receive(message, 0)
        if dist.get_rank() == 0:
            blocked()
        for work in (sent, second, first):
            work.wait()
        if dist.get_rank() == 1:
            blocked()
        assert x.eq(3).all()
        assert y.eq(3).all()
        assert message.eq(7).all()
    return True


def test_data_outstanding_while_a_rank_blocks_elsewhere() -> None:
    assert run_ranks(hold, 2, 2**18) == [True] * 2


@pytest.mark.full
def test_64_mib_outstanding_while_a_rank_blocks_elsewhere() -> None:
    assert run_ranks(hold, 2, 2**24, timeout=300) == [True] * 2


def wrapped() -> bool:
    (group,) = join()
    group._number = 2**32 - 2
    for number in range(5):
        x = torch.tensor([float(number)])
        group.all_reduce(x).wait()
        assert x.item() == 2 * number
    return True


def test_numbers_of_operations_wrap() -> None:
    assert run_ranks(wrapped, 2) == [True] * 2


def in_inference_mode() -> bool:
    (group,) = join()
    with torch.inference_mode():
        x = torch.ones(5)
        work = group.all_reduce(x)
    work.wait()
    assert x.eq(2).all()
    return True


def test_operations_finish_outside_of_the_mode_in_which_they_started() -> None:
    assert run_ranks(in_inference_mode, 2) == [True] * 2


MISMATCHES = {
    "kind": lambda g: g.all_reduce(torch.ones(4)) if dist.get_rank() else g.broadcast(torch.ones(4), 1),
    "shape": lambda g: g.all_reduce(torch.ones(4) if dist.get_rank() else torch.ones(2, 2)),
    "dtype": lambda g: g.all_reduce(torch.ones(4, dtype=torch.float32 if dist.get_rank() else torch.int32)),
    "reduction": lambda g: g.all_reduce(torch.ones(4), "max" if dist.get_rank() else "sum"),
}


def unlike(name: str) -> None:
    MISMATCHES[name](join()[0]).wait()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("kind", r"broadcast 1 of \[4\] float32, but rank 1 called all_reduce 1 of \[4\] float32"),
        ("shape", r"all_reduce 1 of \[2, 2\] float32, but rank 1 called all_reduce 1 of \[4\] float32"),
        ("dtype", r"all_reduce 1 of \[4\] int32, but rank 1 called all_reduce 1 of \[4\] float32"),
        ("reduction", r"all_reduce 1 of \[4\] float32, but rank 1 called all_reduce 1 \(max\) of \[4\] float32"),
    ],
)
def test_unlike_operations_are_an_error_that_names_both(name: str, found: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(unlike, 2, name)
    text = str(failure.value)
    mine, theirs = found.split(", but rank 1 called ")
    either = rf"tp: rank 0 called {found}|tp: rank 1 called {theirs}, but rank 0 called {mine}"
    assert re.search(either, text), text


def killed(folder: str) -> None:
    (group,) = join()
    if dist.get_rank() == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        group.all_reduce(torch.ones(3)).wait()
    except dist.DistError as error:
        Path(folder, f"{dist.get_rank()}").write_text(f"{time.monotonic() - began:.2f} {error}")
        raise


def test_a_killed_peer_is_noticed_by_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(killed, 3, str(tmp_path))
    assert failure.value.rank == 1
    for rank in (0, 2):
        seconds, text = (tmp_path / str(rank)).read_text().split(" ", 1)
        assert float(seconds) < 2.3
        assert text == f"tp: rank 1 ended while rank {rank} waited for it"


def late() -> None:
    (group,) = join(timeout_s=0.5)
    if dist.get_rank() == 0:
        group.all_reduce(torch.ones(3)).wait()
    time.sleep(3)


def test_a_late_peer_is_named() -> None:
    with pytest.raises(RankFailure, match=r"tp: no data from ranks \[1\] within 0.5 s"):
        run_ranks(late, 2)


def many(meshes: int) -> list[int]:
    found = []
    for _ in range(meshes):
        (group,) = join()
        x = torch.ones(2)
        group.all_reduce(x).wait()
        del group
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:megastack")
        found.append(maps + len(os.listdir("/proc/self/fd")))
    return found


def test_memory_and_descriptors_are_released_with_the_group() -> None:
    for found in run_ranks(many, 2, 12):
        assert found[2:] == [found[2]] * 10


@pytest.mark.full
def test_a_thousand_meshes_leave_nothing() -> None:
    for found in run_ranks(many, 2, 1000, timeout=300):
        assert found[2:] == [found[2]] * 998


def without(reason: str) -> list[Any]:
    if reason == "space":
        full = OSError(errno.ENOSPC, "No space left on device")
        change: Any = patch.object(os, "posix_fallocate", side_effect=full)
    else:
        change = patch.object(memory, "_place", lambda: "elsewhere")
    with change if dist.get_rank() == 1 else patch.dict({}):
        found = connect(
            [plan(), plan(0, 2)] if dist.get_rank() != 1 else [plan(), plan(1, 0)], dist.get_rank(), exchange, 9
        )
    return [each if isinstance(each, str) else "shared" for each in found]


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("space", "rank 1: memory cannot be shared: [Errno 28] No space left on device"),
        ("host", "ranks 0 and 1: its memory cannot be mapped: another host or container"),
    ],
)
def test_members_agree_that_memory_cannot_be_shared(reason: str, text: str) -> None:
    found = run_ranks(without, 3, reason)
    assert {each[0] for each in found} == {text}
    assert found[0][1] == found[2][1] == "shared"
