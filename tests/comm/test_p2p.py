"""Messages between pipeline ranks: order on a channel, headers, crossing channels, what is counted."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from megastack.comm.p2p import P2PChannels
from megastack.comm.traffic import Traffic
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks


def channels_of(mesh: Mesh) -> P2PChannels:
    return P2PChannels(mesh[Axis.PP], mesh.backward_channels, mesh.device)


def in_order() -> list[list[float]]:
    """The first rank sends five tensors of growing size; the second posts all receives before it waits for any."""
    mesh = Mesh.from_environment(MeshShape(pp=2))
    channels = channels_of(mesh)
    if mesh.rank == 0:
        for size in range(1, 6):
            channels.send([torch.full((size,), float(size))], 1)
        channels.finish()
        return []
    pending = [channels.receive((size,), torch.float32, 0) for size in range(1, 6)]
    return [operation.wait().tolist() for operation in reversed(pending)][::-1]


def test_a_channel_is_first_in_first_out() -> None:
    assert run_ranks(in_order, 2)[1] == [[float(size)] * size for size in range(1, 6)]


def exchange_all() -> list[list[int]]:
    """Every rank posts its sends to all others before any receive: nothing blocks, for any order of the peers."""
    mesh = Mesh.from_environment(MeshShape(pp=4))
    channels = channels_of(mesh)
    others = [rank for rank in range(4) if rank != mesh.rank]
    for count in range(3):
        for peer in others if mesh.rank % 2 else reversed(others):
            channels.send([torch.tensor([mesh.rank, peer, count])], peer)
    pending = [channels.receive((3,), torch.int64, peer) for _ in range(3) for peer in others]
    received = [operation.wait().tolist() for operation in pending]
    channels.finish()
    return received


def test_channels_cross_without_blocking_and_do_not_mix() -> None:
    for rank, received in enumerate(run_ranks(exchange_all, 4)):
        assert received == [[peer, rank, count] for count in range(3) for peer in range(4) if peer != rank]


def slow_receiver() -> float:
    mesh = Mesh.from_environment(MeshShape(pp=2))
    channels = channels_of(mesh)
    if mesh.rank == 1:
        time.sleep(0.5)
        for _ in range(4):
            channels.receive((1000,), torch.float64, 0).wait()
        return 1.0
    began = time.perf_counter()
    for _ in range(4):
        channels.send([torch.zeros(1000, dtype=torch.float64)], 1)
    posted = time.perf_counter() - began
    channels.finish()
    return posted


def test_a_send_does_not_wait_for_its_receiver() -> None:
    assert run_ranks(slow_receiver, 2)[0] < 0.4


def mixed() -> tuple[Any, list[Any]]:
    mesh = Mesh.from_environment(MeshShape(pp=2))
    channels = channels_of(mesh)
    header = [{"name": "hidden", "shape": [2, 3]}, {"name": "nothing", "shape": None}, "ü"]
    if mesh.rank == 1:  # to a lower place
        channels.send([], 0, header=header)
        channels.send([torch.ones(2, 3, dtype=torch.bfloat16).T], 0)
        channels.send([torch.tensor([True, False])], 0)
        channels.send([], 0, header=[])
        channels.finish()
        return mesh.ledger.records(), []
    first = channels.receive_header(1)
    second = channels.receive((3, 2), torch.bfloat16, 1).wait()
    third = channels.receive((2,), torch.bool, 1).wait()
    assert first == header
    return mesh.ledger.records(), [second.shape, second.dtype, third.tolist(), channels.receive_header(1)]


def test_headers_and_tensors_share_a_channel_and_only_tensors_are_counted() -> None:
    (received, seen), (sent, _) = run_ranks(mixed, 2)
    assert seen == [(3, 2), torch.bfloat16, [True, False], []]
    assert received == {}, "a receive counts nothing"
    assert sent == {("pp", "send"): Traffic(2, 14, 14)}


def kept_until_matched() -> tuple[int, int]:
    mesh = Mesh.from_environment(MeshShape(pp=2))
    channels = channels_of(mesh)
    if mesh.rank == 1:
        total = sum(int(channels.receive((1,), torch.int64, 0).wait()) for _ in range(50))
        return total, 0
    for number in range(50):
        channels.send([torch.tensor([number])], 1)  # the only reference to the tensor
    channels.finish()
    return 0, channels.posted


def test_a_tensor_is_kept_until_its_message_is_matched() -> None:
    assert run_ranks(kept_until_matched, 2) == [(0, 0), (sum(range(50)), 0)]


def groups_of_channels() -> tuple[bool, bool]:
    mesh = Mesh.from_environment(MeshShape(pp=2, dp=2))
    channels, group = channels_of(mesh), mesh[Axis.PP].group
    assert mesh.backward_channels is not None
    same_ranks = dist.get_process_group_ranks(mesh.backward_channels) == list(mesh[Axis.PP].ranks)
    return channels._process_group(0, 1) is group and channels._process_group(
        1, 0
    ) is mesh.backward_channels is not group, same_ranks


def test_the_two_directions_of_a_pair_use_two_process_groups() -> None:
    """One group would do for gloo; NCCL would deadlock where messages cross."""
    assert run_ranks(groups_of_channels, 4) == [(True, True)] * 4


def test_a_mesh_without_a_pipeline_has_no_second_group() -> None:
    assert Mesh.single().backward_channels is None
    assert run_ranks(second_group, 2) == [None] * 2


def second_group() -> object:
    return Mesh.from_environment(MeshShape(dp=2)).backward_channels
