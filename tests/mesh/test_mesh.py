"""A live mesh: groups along axes, fused and cut ones, several meshes in one process, and what it refuses."""

from __future__ import annotations

import os
import re
import socket
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megastack.comm.collectives import all_reduce, start_all_reduce
from megastack.comm.observer import NO_OBSERVER, RankObserver
from megastack.comm.p2p import P2PChannels
from megastack.comm.traffic import Traffic
from megastack.errors import MeshError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks

AXES = (Axis.PP, Axis.DP, Axis.CP, Axis.TP)


def members(shape: MeshShape) -> dict[str, tuple[int, tuple[int, ...], int]]:
    """Of each group of this rank: its place in it, the ranks, and the sum of their numbers as the group makes it."""
    mesh = Mesh.from_environment(shape)
    wanted: dict[str, Any] = {axis.value: axis for axis in AXES}
    wanted |= {"dp+cp": (Axis.DP, Axis.CP), "pp+tp": (Axis.PP, Axis.TP), "pp+dp+cp": (Axis.CP, Axis.PP, Axis.DP)}
    wanted["world"] = AXES
    found = {}
    for name, axes in wanted.items():
        group = mesh[axes]
        total = all_reduce(torch.tensor(float(mesh.rank)), group)
        found[name] = (group.rank, group.ranks, int(total))
        assert group.size == len(group.ranks)
        assert (group.group is None) == (group.size == 1)
        assert mesh[axes] is group, "asked twice, the same group"
    assert mesh.world == mesh[AXES]
    assert mesh.coordinates == shape.coordinates(mesh.rank)
    return found


@pytest.mark.parametrize("shape", [MeshShape(pp=2, dp=2, tp=2), MeshShape(dp=2, cp=2), MeshShape(tp=3)], ids=str)
def test_groups_are_those_of_the_shape_and_add_over_their_ranks(shape: MeshShape) -> None:
    for rank, found in enumerate(run_ranks(members, shape.world_size, shape)):
        for name, (place, ranks, total) in found.items():
            axes = AXES if name == "world" else [Axis(axis) for axis in name.split("+")]
            (expected,) = [group for group in shape.groups(*axes) if rank in group]
            assert (list(ranks), place) == (expected, expected.index(rank)), name
            assert total == sum(expected), name


def labels() -> dict[str, str]:
    mesh = Mesh.from_environment(MeshShape(pp=2, cp=2))
    groups = {
        "dp": mesh[Axis.DP],
        "cp": mesh[Axis.CP],
        "dp+cp": mesh[Axis.DP, Axis.CP],
        "pp+tp": mesh[Axis.PP, Axis.TP],
        "pp+dp+cp": mesh[Axis.PP, Axis.DP, Axis.CP],
        "tp": mesh[Axis.TP],
    }
    return {name: group.axis for name, group in groups.items()}


def test_the_ledger_names_groups_by_the_axes_that_are_there() -> None:
    expected = {"dp": "dp", "cp": "cp", "dp+cp": "dp", "pp+tp": "pp", "pp+dp+cp": "pp_dp", "tp": "tp"}
    assert run_ranks(labels, 4) == [expected] * 4


def two_meshes() -> tuple[float, float, Traffic, Traffic]:
    one, other = Mesh.from_environment(MeshShape(dp=4)), Mesh.from_environment(MeshShape(pp=2, tp=2))
    x = torch.tensor(float(one.rank))
    sums = float(all_reduce(x, one[Axis.DP])), float(all_reduce(x, other[Axis.TP]))
    third = Mesh.from_environment(MeshShape(dp=2, tp=2))
    assert float(all_reduce(x, third[Axis.DP])) == {0: 2, 1: 4, 2: 2, 3: 4}[one.rank]
    return *sums, one.ledger.total(), other.ledger.total()


def test_several_meshes_live_in_one_process_with_a_ledger_each() -> None:
    for rank, (whole, pair, first, second) in enumerate(run_ranks(two_meshes, 4)):
        assert (whole, pair) == (6, 1 if rank < 2 else 5)
        assert (first, second) == (Traffic(1, 4, 6), Traffic(1, 4, 4))


def subgroups() -> tuple[int, int, int]:
    mesh = Mesh.from_environment(MeshShape(tp=4))
    first = mesh.rank // 2 * 2
    pair = mesh.subgroup(Axis.TP, [first + 1, first])
    assert mesh.subgroup(Axis.TP, range(first, first + 2)) is pair, "asked twice, the same group"
    assert (pair.ranks, pair.rank, pair.axis) == ((first, first + 1), mesh.rank - first, "tp")
    assert mesh.subgroup(Axis.TP, range(4)) is mesh[Axis.TP]
    alone = mesh.subgroup(Axis.TP, [mesh.rank])
    assert (alone.size, alone.group, alone.ranks) == (1, None, (mesh.rank,))
    with pytest.raises(MeshError, match=f"tp={mesh.rank}: is not a member of the subgroup"):
        mesh.subgroup(Axis.TP, [(mesh.rank + 1) % 4])
    with pytest.raises(MeshError, match="coordinates of tp are 0 … 3"):
        mesh.subgroup(Axis.TP, [mesh.rank, 4])
    return int(all_reduce(torch.tensor(mesh.rank), pair)), pair.size, pair.rank


def test_subgroups_are_made_by_their_members() -> None:
    assert run_ranks(subgroups, 4) == [(1, 2, 0), (1, 2, 1), (5, 2, 0), (5, 2, 1)]


def mesh_after_lonely_subgroup() -> int:
    """Two of four ranks make a group that the others know nothing of; then all of them make another mesh."""
    first = Mesh.from_environment(MeshShape(pp=4))
    if first.rank in (0, 3):
        first.subgroup(Axis.PP, [0, 3])
    second = Mesh.from_environment(MeshShape(pp=2, dp=2))
    return int(all_reduce(torch.tensor(second.rank), second[Axis.PP, Axis.DP]))


def test_a_mesh_can_follow_subgroups_of_some_ranks() -> None:
    assert run_ranks(mesh_after_lonely_subgroup, 4, timeout=20) == [6] * 4


def subgroup_after_lonely_ones() -> int:
    """Ranks that hold unlike numbers of groups make one together, twice."""
    first = Mesh.from_environment(MeshShape(pp=4))
    if first.rank in (0, 3):
        first.subgroup(Axis.PP, [0, 3])
    pair = [0, 1] if first.rank < 2 else [2, 3]
    total = all_reduce(torch.tensor(first.rank), first.subgroup(Axis.PP, pair))
    second = Mesh.from_environment(MeshShape(tp=4))
    return int(total + all_reduce(torch.tensor(first.rank), second.subgroup(Axis.TP, pair)))


def test_members_with_unlike_numbers_of_groups_make_one_together() -> None:
    assert run_ranks(subgroup_after_lonely_ones, 4, timeout=20) == [2, 2, 10, 10]


def test_one_rank_needs_no_process_group() -> None:
    mesh = Mesh.single()
    assert not dist.is_initialized()
    assert (mesh.shape, mesh.rank, mesh.device) == (MeshShape(), 0, torch.device("cpu"))
    x = torch.ones(3)
    for axes in (*AXES, (Axis.DP, Axis.CP), AXES):
        group = mesh[axes]
        assert (group.rank, group.size, group.ranks, group.group) == (0, 1, (0,), None)
        assert all_reduce(x, group) is x
    assert mesh.ledger.total() == Traffic()
    assert "one rank" in repr(mesh)


def test_the_expert_axis_has_no_group_here() -> None:
    with pytest.raises(MeshError, match="must be axes among pp, dp, cp, tp"):
        Mesh.single()[Axis.EP]


def wrong_size(**degrees: int) -> str:
    with pytest.raises(MeshError) as caught:
        Mesh.from_environment(MeshShape(**degrees))
    return str(caught.value)


def in_three() -> str:
    return wrong_size(dp=2, tp=2)


def test_a_shape_that_is_not_the_world_is_refused_with_the_numbers_on_every_rank() -> None:
    message = "pp=1 dp=2 cp=1 tp=2: the product 4 must be the number of ranks, 3"
    assert run_ranks(in_three, 3) == [message] * 3


def test_a_wrong_world_size_is_refused_before_anyone_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "pp=4 dp=1 cp=1 tp=1: the product 4 must be the number of ranks, 8" in wrong_size(pp=4)


def test_ranks_without_a_launcher_are_refused_by_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert Mesh.from_environment(MeshShape(), device="cpu").world.size == 1
    monkeypatch.setenv("MASTER_PORT", "29500")
    message = wrong_size(tp=2)
    assert re.match(r"tp2: 2 ranks need a launcher, but RANK, WORLD_SIZE, MASTER_ADDR are not set", message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(MeshError, match="device=cuda: local rank 0 of this machine, which has 0 GPUs; use device=cpu"):
        Mesh.from_environment(MeshShape(), device="cuda")


def launched(port: int) -> str:
    """As a launcher's worker: no process group yet, but its variables."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    values = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in values.items()}):
        mesh = Mesh.from_environment(MeshShape(dp=2), device="cpu", timeout_s=20)
    return f"{mesh} {int(all_reduce(torch.tensor(mesh.rank), mesh[Axis.DP]))}"


def test_variables_of_a_launcher_open_the_process_group() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    expected = [f"Mesh(dp2, rank {rank} | pp0 dp{rank} tp0, cpu) 1" for rank in range(2)]
    assert run_ranks(launched, 2, port) == expected


def waits_in_vain() -> dict[str, float]:
    """Of each kind of group: how long a rank waits for the last one, which does not come."""
    mesh = Mesh.from_environment(MeshShape(dp=2, pp=2, tp=2), timeout_s=3)
    last = mesh.shape.world_size - 1
    groups: dict[str, Any] = {axis.value: mesh[axis] for axis in (Axis.PP, Axis.DP, Axis.TP)}
    groups["pp+tp"] = mesh[Axis.PP, Axis.TP]
    if mesh.coordinates[Axis.TP]:
        groups["pair"] = mesh.subgroup((Axis.PP, Axis.TP), [1, 3])
    if mesh.rank == last:
        time.sleep(6)
        return {}
    began = time.monotonic()
    pending = {name: start_all_reduce(torch.ones(1), group) for name, group in groups.items() if last in group.ranks}
    if last in mesh[Axis.PP].ranks:
        channels = P2PChannels(mesh[Axis.PP], mesh.backward_channels, mesh.device)
        pending["backward"] = channels.receive((1,), torch.float32, 1)
    for operation in pending.values():
        with pytest.raises(RuntimeError):
            operation.wait()
    return dict.fromkeys(pending, time.monotonic() - began)


@pytest.mark.full
def test_every_group_gives_up_after_the_time_out() -> None:
    """Groups do not take the time-out of the default one by themselves."""
    results = run_ranks(waits_in_vain, 8)
    assert {name for took in results for name in took} == {"pp", "dp", "tp", "pp+tp", "pair", "backward"}
    assert max(seconds for took in results for seconds in took.values()) < 20


def test_a_bare_mesh_counts_and_records_nothing() -> None:
    mesh = Mesh.single()
    mesh.observer.on_operation("tp", "all_reduce", (0, 1), (2,), 8)
    mesh.observer.on_layer("head")
    assert mesh.ledger.total() == Traffic() and not mesh.flight_recorder.operations
    assert mesh.flight_recorder.layer is None and mesh[Axis.TP].observer is mesh.observer is NO_OBSERVER


def test_a_mesh_of_the_environment_has_an_observer_of_its_own() -> None:
    one, other = (Mesh.from_environment(MeshShape(), device="cpu") for _ in range(2))
    one[Axis.TP].observer.on_operation("tp", "all_reduce", (0, 1), (2,), 8)
    assert one.ledger.total() == Traffic(1, 8, 8) and other.ledger.total() == Traffic()
    chosen = RankObserver()
    mesh = Mesh.from_environment(MeshShape(), device="cpu", observer=chosen)
    assert mesh.world.observer is chosen and mesh.ledger is chosen.ledger
