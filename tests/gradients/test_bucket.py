"""ZeRO-1: shards are reduced, updated and gathered like whole buckets, and no parameter is read before its gather."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megastack.errors import ConfigError
from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.norm import clip_gradients_, grad_norm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.optim.optimizer import build_optimizer
from megastack.optim.update_rules import OptimizerOptions
from megastack.placement.boxes import Box
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Normal, Ones, Placement, Shard
from megastack.random import counter_normal
from megastack.testing.ranks import run_ranks
from tests.gradients.live_bytes import settled_bytes

OPTIONS = {"sgd": OptimizerOptions("sgd", momentum=0.9), "adamw": OptimizerOptions("adamw", weight_decay=0.1)}


class Bag(ParallelModule):
    """Parameters without a layer, whose gradients the caller sets."""

    def __init__(self, mesh: Mesh, **placements: Placement) -> None:
        super().__init__(mesh)
        self.declared = placements
        self.create_parameters()
        self.double()

    def placements(self) -> dict[str, Placement]:
        return self.declared

    def forward(self) -> Tensor:
        return sum((parameter.sum() for parameter in self.parameters()), torch.zeros(()))


def noise(name: str, shape: tuple[int, ...], rank: int) -> Tensor:
    return counter_normal(1, f"{name}/{rank}", shape, Box((0,) * len(shape), shape), std=1.0, dtype=torch.float64)


def train(mesh: Mesh, bag: Bag, optimizer_name: str, steps: int, **options: object) -> dict[str, object]:
    """The results, on this rank, of steps with gradients that differ on every rank."""
    buckets = GradientBuckets([bag], mesh, bucket_size=16, **options)
    optimizer = build_optimizer(buckets, OPTIONS[optimizer_name])
    found: dict[str, object] = {"gradients": [], "norms": []}
    for step in range(steps):
        for name, gradient in buckets.named_gradients():
            gradient.copy_(noise(f"{name}/{step}", tuple(gradient.shape), mesh.rank))
        buckets.finish()
        found["gradients"].append({name: x.clone() for name, x in buckets.named_gradients()})
        found["norms"].append(clip_gradients_(buckets, 1.0, mesh).item())
        optimizer.step(0.1)
        buckets.zero_()
    buckets.wait_parameters()
    found["weights"] = {name: x.detach().clone() for name, x in bag.named_parameters()}
    return found


def levels_differ_by(shape: MeshShape, optimizer_name: str, shard_size: int | None) -> float:
    """The largest difference between ZeRO levels 0 and 1 after three steps, over all kinds of parameters."""
    mesh = Mesh.from_environment(shape)
    tp = mesh.shape.tp
    declared = {
        "cut": Placement((4, 3), {Axis.TP: Shard(0)}),
        "copied": Placement((4,), {Axis.TP: Shard(0, copies=min(2, tp))}),
        "whole": Placement((5,), init=Ones(), decay=False),
        "partial": Placement((7,), partial=frozenset({Axis.TP})),
        "tied": Placement((3, 5)),
        f"own{mesh.coordinates[Axis.PP]}": Placement((3,)),
    }
    if mesh.coordinates[Axis.PP]:
        declared = dict(reversed(declared.items()))
    plain = train(mesh, Bag(mesh, **declared), optimizer_name, 3)
    sharded = train(mesh, Bag(mesh, **declared), optimizer_name, 3, zero=1, shard_size=shard_size)
    worst = max(abs(a - b) for a, b in zip(plain["norms"], sharded["norms"], strict=True))
    pairs = [*zip(plain["gradients"], sharded["gradients"], strict=True), (plain["weights"], sharded["weights"])]
    for expected, found in pairs:
        assert set(expected) == set(found)
        worst = max(worst, *((expected[name] - found[name]).abs().max().item() for name in expected))
    return worst


@pytest.mark.parametrize(
    ("shape", "optimizer", "shard_size"),
    [
        (MeshShape(dp=2), "adamw", None),
        (MeshShape(dp=4), "sgd", None),
        (MeshShape(dp=4), "adamw", 2),
        (MeshShape(dp=2, cp=2), "adamw", 2),
        (MeshShape(dp=2, tp=2), "sgd", None),
        (MeshShape(dp=2, pp=2), "adamw", None),
        (MeshShape(dp=2, tp=2, pp=2), "adamw", None),
        (MeshShape(dp=4, tp=2), "sgd", 2),
    ],
    ids=str,
)
def test_gradients_norms_and_updates_equal_those_of_whole_buckets(
    shape: MeshShape, optimizer: str, shard_size: int | None
) -> None:
    assert max(run_ranks(levels_differ_by, shape.world_size, shape, optimizer, shard_size)) < 1e-13


def ten_steps(zero: int) -> dict[str, object]:
    """Two microbatches per step, one unused parameter, three scalars over four ranks: some shards are empty."""
    mesh = Mesh.from_environment(MeshShape(dp=4))
    bag = Bag(mesh, **{name: Placement((), init=Ones()) for name in ("a", "b", "c")}, unused=Placement((3,)))
    buckets = GradientBuckets([bag], mesh, zero=zero)
    optimizer = build_optimizer(buckets, OPTIONS["adamw"])
    norms = []
    for step in range(10):
        buckets.zero_()
        bag()  # a forward waits for the gathers
        for micro in range(2):
            if micro == 1:
                buckets.mark_last_backward(0)
            used = ("a", "b", "c") if mesh.rank % 2 else ("c", "a", "b")
            loss = torch.zeros((), dtype=torch.float64)
            for place, name in enumerate(used):
                loss = loss + (step + 1.0 + micro + mesh.rank) * (place + 1) * bag.get_parameter(name).square()
            loss.backward()
        buckets.finish()
        norms.append(clip_gradients_(buckets, 1.0, mesh).item())
        optimizer.step(0.05)
    buckets.wait_parameters()
    local = [bucket.local_parameters.numel() for bucket in buckets.buckets]
    return {"weights": [p.tolist() for p in bag.parameters()], "norms": norms, "local": local}


def test_ten_steps_with_empty_shards_an_unused_parameter_and_other_orders_equal_level_0() -> None:
    plain, sharded = run_ranks(ten_steps, 4, 0), run_ranks(ten_steps, 4, 1)
    for before, after in zip(plain, sharded, strict=True):
        torch.testing.assert_close(after["norms"], before["norms"], rtol=1e-12, atol=0)
        torch.testing.assert_close(after["weights"], before["weights"], rtol=1e-12, atol=0)
        assert sum(after["local"]) < sum(before["local"])


class Block(ParallelModule):
    """One matrix."""

    def __init__(self, mesh: Mesh, width: int) -> None:
        super().__init__(mesh)
        self.width = width
        self.create_parameters()
        self.double()

    def placements(self) -> dict[str, Placement]:
        return {"weight": Placement((self.width, self.width), init=Normal(0.5))}

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD @ self.weight


class Stack(ParallelModule):
    """Blocks and a scale that the stack uses itself."""

    def __init__(self, mesh: Mesh, depth: int, width: int) -> None:
        super().__init__(mesh)
        self.width = width
        self.blocks = torch.nn.ModuleList(Block(mesh, width) for _ in range(depth))
        self.create_parameters()
        self.double()

    def placements(self) -> dict[str, Placement]:
        return {"scale": Placement((self.width,), init=Ones(), decay=False)}

    def forward(self, x_BD: Tensor) -> Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return (x_BD * self.scale).sum()


def waits_under_a_forward() -> tuple[list[int], dict[tuple[str, str], tuple[int, int]]]:
    """The gathers still running when each block runs, and the traffic of one step."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    stack = Stack(mesh, 3, 4)
    buckets = GradientBuckets([stack], mesh, zero=1, units=stack.blocks, bucket_size=1)
    optimizer = build_optimizer(buckets, OPTIONS["adamw"])
    gathers = buckets._gathers
    seen: list[int] = []
    for block in stack.blocks:
        block.register_forward_pre_hook(lambda *_: seen.append(len(gathers._pending)))
    x_BD = torch.ones(1, 4, dtype=torch.float64)
    buckets.mark_last_backward(0)
    stack(x_BD).backward()
    seen.clear()
    mesh.ledger.reset()
    buckets.finish()
    optimizer.step(0.1)
    traffic = {key: (total.calls, total.wire_bytes) for key, total in mesh.ledger.records().items()}
    seen.append(len(gathers._pending))
    with torch.no_grad():
        stack(x_BD)
    return [*seen, len(gathers._pending)], traffic


def test_a_forward_waits_for_the_parameters_of_each_block_when_it_is_called() -> None:
    for seen, traffic in run_ranks(waits_under_a_forward, 2):
        assert seen == [4, 2, 1, 0, 0]  # the scale, used by the stack itself, is waited for first
        assert traffic == {("dp", "all_gather"): (4, (3 * 16 + 4) * 8 // 2)}


def reads_before_and_after_waiting() -> bool:
    """Whether, without units, all parameters are gathered when the forward begins."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    stack = Stack(mesh, 2, 4)
    buckets = GradientBuckets([stack], mesh, zero=1)
    for _, gradient in buckets.named_gradients():
        gradient.fill_(1.0)
    buckets.finish()
    before = {name: x.detach().clone() for name, x in stack.named_parameters()}
    build_optimizer(buckets, OptimizerOptions("sgd")).step(0.5)
    with torch.no_grad():
        stack(torch.ones(1, 4, dtype=torch.float64))
    return all(torch.allclose(x, before[name] - 1.0) for name, x in stack.named_parameters())


def test_without_units_a_stage_waits_for_all_its_parameters() -> None:
    assert run_ranks(reads_before_and_after_waiting, 2) == [True, True]


def traffic_of_a_step(shape: MeshShape, shard_size: int | None, reduce: torch.dtype | None) -> dict:
    mesh = Mesh.from_environment(shape)
    bag = Bag(mesh, a=Placement((16, 8))).to(torch.bfloat16)
    buckets = GradientBuckets([bag], mesh, zero=1, shard_size=shard_size, reduce_dtype=reduce)
    optimizer = build_optimizer(buckets, OPTIONS["adamw"])
    mesh.ledger.reset()
    bag().backward()
    buckets.finish()
    norm = grad_norm(buckets, mesh).item()
    assert norm == pytest.approx(mesh.world.size * 128**0.5, rel=1e-6)
    optimizer.step(0.1)
    buckets.wait_parameters()
    return {key: (total.calls, total.payload_bytes, total.wire_bytes) for key, total in mesh.ledger.records().items()}


@pytest.mark.parametrize(("reduce", "size"), [(None, 4), (torch.bfloat16, 2)])
def test_gradients_are_reduced_in_the_reduce_dtype_and_the_counters_match_closed_forms(
    reduce: torch.dtype | None, size: int
) -> None:
    n, d, s = 128, 4, 2
    for records in run_ranks(traffic_of_a_step, d, MeshShape(dp=d), None, reduce):
        assert records["dp", "reduce_scatter"] == (1, n * size, n * size * (d - 1) // d)
        assert records["dp", "all_gather"] == (1, n * 2, n * 2 * (d - 1) // d)
        assert records["dp", "all_reduce"] == (1, 8, 2 * 8 * (d - 1) // d)  # the norm
    for records in run_ranks(traffic_of_a_step, d, MeshShape(dp=d), s, reduce):
        replicas = d // s
        assert records["dp", "reduce_scatter"] == (1, n * size, n * size * (s - 1) // s)
        assert records["dp", "all_gather"] == (1, n * 2, n * 2 * (s - 1) // s)
        replica_sum = 2 * (n // s) * size * (replicas - 1) // replicas
        assert records["dp", "all_reduce"] == (2, n // s * size + 8, replica_sum + 2 * 8 * (d - 1) // d)


def tied_copies() -> list[float]:
    """Copy gradients 1, 2 on the first stage and 3, 4 on the last, as the mean over two data ranks."""
    mesh = Mesh.from_environment(MeshShape(pp=2, dp=2))
    stage, replica = mesh.coordinates[Axis.PP], mesh.coordinates[Axis.DP]
    own = {f"own{stage}": Placement((6,))}
    tied = {"tied": Placement((5,)), "also": Placement((2,))}
    bag = Bag(mesh, **(tied | own if stage == 0 else own | dict(reversed(tied.items()))))
    buckets = GradientBuckets([bag], mesh, zero=1)
    (bag.get_parameter("tied") * (1.0 + 2 * stage + replica) / 2).sum().backward()
    buckets.finish()
    gradient = dict(buckets.named_gradients())["tied"]
    return [*gradient.tolist(), grad_norm(buckets, mesh).item()]


def test_shards_of_tied_copies_are_summed_after_the_data_group_and_counted_once() -> None:
    for found in run_ranks(tied_copies, 4):
        assert found == pytest.approx([5.0] * 5 + [5.0 * 5**0.5])


def sums_of_shards() -> dict[tuple[str, str], int]:
    mesh = Mesh.from_environment(MeshShape(pp=2, dp=2, tp=2))
    partial = {f"partial{mesh.coordinates[Axis.PP]}": Placement((8,), partial=frozenset({Axis.TP}))}
    bag = Bag(mesh, **partial, tied=Placement((12,)))
    buckets = GradientBuckets([bag], mesh, zero=1)
    mesh.ledger.reset()
    bag().backward()
    buckets.finish()
    return {key: total.payload_bytes for key, total in mesh.ledger.records().items()}


def test_sums_after_the_reduce_scatter_run_on_shards() -> None:
    shards = {("tp", "all_reduce"): 8 // 2 * 8, ("pp", "all_reduce"): 12 // 2 * 8}
    assert run_ranks(sums_of_shards, 8) == [{("dp", "reduce_scatter"): (8 + 12) * 8, **shards}] * 8


def invalid_shard_size() -> str:
    mesh = Mesh.from_environment(MeshShape(dp=4))
    with pytest.raises(ConfigError) as caught:
        GradientBuckets([Bag(mesh, a=Placement((2,)))], mesh, zero=1, shard_size=3)
    return str(caught.value)


def test_a_shard_size_that_does_not_divide_the_data_group_is_an_error() -> None:
    assert all(
        "shard_size=3: must divide dp·cp = 4; use 1, 2, 4" in message for message in run_ranks(invalid_shard_size, 4)
    )


def bytes_held(zero: int, dp: int, expected: float) -> tuple[int, int]:
    """Parameters of a stage, and the measured bytes of all storages that are live after a step."""
    mesh = Mesh.from_environment(MeshShape(dp=dp))
    bag = Bag(mesh, **{f"w{i}": Placement((1024, 1024 + i)) for i in range(5)}, odd=Placement((777,)))
    bag.to(torch.bfloat16)
    buckets = GradientBuckets([bag], mesh, zero=zero)
    optimizer = build_optimizer(buckets, OPTIONS["adamw"])
    bag().backward()
    buckets.finish()
    clip_gradients_(buckets, 1.0, mesh)
    optimizer.step(0.1)
    buckets.zero_()
    count = sum(parameter.numel() for parameter in bag.parameters())
    return count, settled_bytes(1.02 * expected * count)


@pytest.mark.parametrize(
    ("zero", "dp", "expected"),
    [
        (0, 1, 18),
        (1, 2, 6 + 12 / 2),
        pytest.param(0, 2, 18, marks=pytest.mark.full),
        pytest.param(1, 4, 6 + 12 / 4, marks=pytest.mark.full),
    ],
)
def test_bytes_held_per_parameter(zero: int, dp: int, expected: float) -> None:
    for count, held in run_ranks(bytes_held, dp, zero, dp, expected):
        assert count > 5_000_000
        assert held / count == pytest.approx(expected, rel=0.02)
