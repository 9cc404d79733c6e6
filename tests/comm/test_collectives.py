"""Collectives: right values for every dim, dtype and memory layout; inputs untouched; what the ledger counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megastack.comm.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    reduce_scatter,
    start_all_gather,
    start_all_gather_,
    start_all_reduce,
    start_all_reduce_,
    start_reduce_scatter,
)
from megastack.comm.group import AxisGroup
from megastack.comm.objects import all_gather_objects, gather_objects
from megastack.comm.observer import RankObserver
from megastack.comm.traffic import Traffic
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def tensors(rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Small whole numbers, exact in every dtype, contiguous and not; every dim is a multiple of 2 and of 3."""
    base = torch.arange(6 * 12 * 6).view(6, 12, 6) % 7 + 10 * rank
    base = base.to(dtype)
    return {
        "contiguous": base,
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2],
        "expanded": base[:1].expand(6, 12, 6),
        "vector": base[0, 0],
    }


def check_all(size: int) -> int:
    mesh = Mesh.from_environment(MeshShape(tp=size))
    group, checked = mesh[Axis.TP], 0
    for dtype in DTYPES:
        everyone = [tensors(rank, dtype) for rank in range(size)]
        for name, x in tensors(mesh.rank, dtype).items():
            xs = [every[name] for every in everyone]
            untouched = x.clone()
            check(f"sum {name}", all_reduce(x, group), sum(xs[1:], xs[0]))
            check(f"max {name}", all_reduce(x, group, "max"), xs[-1])
            check(f"min {name}", all_reduce(x, group, "min"), xs[0])
            check(f"broadcast {name}", broadcast(x, group, source=size - 1), xs[-1])
            for dim in range(-x.dim(), x.dim()):
                check(f"gather {name} {dim}", all_gather(x, group, dim), torch.cat(xs, dim))
                piece = sum(xs[1:], xs[0]).chunk(size, dim)[mesh.rank]
                check(f"scatter {name} {dim}", reduce_scatter(x, group, dim), piece)
                checked += 1
            assert torch.equal(x, untouched), f"{name} was changed"
    return checked


def check(what: str, actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype, what
    assert torch.equal(actual, expected), f"{what}: {actual} is not {expected}"


@pytest.mark.parametrize("size", [2, 3])
def test_values_on_every_dim_dtype_and_layout(size: int) -> None:
    assert run_ranks(check_all, size, size) == [4 * (4 * 6 + 2)] * size


def fresh_results() -> list[bool]:
    """Whether results share memory with the input."""
    group = Mesh.from_environment(MeshShape(tp=2))[Axis.TP]
    x = torch.ones(4)
    results = [all_reduce(x, group), all_gather(x, group), reduce_scatter(x, group), broadcast(x, group)]
    return [result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for result in results]


def test_results_are_new_tensors() -> None:
    assert run_ranks(fresh_results, 2) == [[False] * 4] * 2


def several_under_way() -> tuple[list[float], bool]:
    group = Mesh.from_environment(MeshShape(tp=2))[Axis.TP]
    x = torch.tensor([1.0, 2.0]) + group.rank
    buffer = x.clone()
    pending = [
        start_all_reduce(x, group),
        start_all_gather(x, group),
        start_reduce_scatter(x, group),
        start_all_reduce_(buffer, group),
    ]
    results = [operation.wait() for operation in pending]
    assert all(operation.wait() is result for operation, result in zip(pending, results, strict=True))
    return torch.cat(results[:3]).tolist(), results[3] is buffer and torch.equal(buffer, results[0])


def test_operations_run_side_by_side_and_may_be_waited_for_again() -> None:
    for rank, (values, in_place) in enumerate(run_ranks(several_under_way, 2)):
        assert values == [3, 5, 1, 2, 2, 3, 3 + 2 * rank]
        assert in_place


def left_behind() -> bool:
    group = Mesh.from_environment(MeshShape(tp=2))[Axis.TP]
    if group.rank:
        time.sleep(0.3)
    start_all_gather_(torch.zeros(1 << 16), group)
    return True


def test_a_rank_may_leave_a_gather_behind_that_others_have_not_begun() -> None:
    assert run_ranks(left_behind, 2) == [True, True]


@pytest.mark.parametrize(
    "operation",
    [
        all_reduce,
        all_gather,
        reduce_scatter,
        broadcast,
        lambda x, group: start_all_reduce(x, group).wait(),
        lambda x, group: start_all_gather(x, group).wait(),
        lambda x, group: start_reduce_scatter(x, group).wait(),
        lambda x, group: start_all_reduce_(x, group).wait(),
    ],
)
def test_one_rank_gets_its_input_back_and_counts_nothing(operation: Callable[[Tensor, AxisGroup], Tensor]) -> None:
    observer = RankObserver()
    x = torch.ones(3).expand(2, 3)
    assert operation(x, AxisGroup.single("tp", observer)) is x
    assert observer.ledger.total() == Traffic() and not observer.flight_recorder.operations


def counted(size: int) -> dict[str, Traffic]:
    mesh = Mesh.from_environment(MeshShape(tp=size))
    group, x = mesh[Axis.TP], torch.zeros(size, 6, dtype=torch.float64)
    all_reduce(x, group)
    start_all_reduce_(x, group).wait()
    all_gather(x[:1], group, 1)
    reduce_scatter(x, group)
    broadcast(x, group, source=1)
    assert all(axis == "tp" for axis, _ in mesh.ledger.records())
    return {op: traffic for (_, op), traffic in mesh.ledger.records().items()}


@pytest.mark.parametrize("size", [2, 3])
def test_the_ledger_counts_the_whole_tensor_and_the_ring(size: int) -> None:
    whole = size * 6 * 8
    for rank, found in enumerate(run_ranks(counted, size, size)):
        assert found["all_reduce"] == Traffic(2, 2 * whole, 2 * 2 * (size - 1) * whole // size)
        assert found["all_gather"] == Traffic(1, whole, (size - 1) * whole // size)
        assert found["reduce_scatter"] == Traffic(1, whole, (size - 1) * whole // size)
        assert ("broadcast" in found) == (rank == 1), "a broadcast is counted where it starts"
    assert run_ranks(counted, size, size)[1]["broadcast"] == Traffic(1, whole, whole)


def uneven() -> None:
    reduce_scatter(torch.ones(3), Mesh.from_environment(MeshShape(tp=2))[Axis.TP])


def test_a_dim_that_does_not_divide_is_a_mistake() -> None:
    with pytest.raises(Exception, match=r"dim 0 of \(3,\) is not a multiple of 2"):
        run_ranks(uneven, 2)


def objects() -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    mesh = Mesh.from_environment(MeshShape(dp=3))
    value = {"rank": mesh.rank}
    return all_gather_objects(value, mesh[Axis.DP]), gather_objects(value, mesh[Axis.DP])


def test_objects_of_all_ranks_come_in_group_order() -> None:
    everyone = [{"rank": rank} for rank in range(3)]
    assert run_ranks(objects, 3) == [(everyone, everyone), (everyone, []), (everyone, [])]
    assert all_gather_objects(1, AxisGroup.single("dp")) == gather_objects(1, Mesh.single().world) == [1]
