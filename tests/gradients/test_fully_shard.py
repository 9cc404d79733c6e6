"""Parameters sharded over the data group: memory, traffic, updates and errors."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import Tensor

from megastack.errors import PlacementError
from megastack.gradients.fully_shard import FullyShardedGradients
from megastack.gradients.norm import clip_gradients_, is_nonfinite
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.optim.optimizer import build_optimizer
from megastack.placement.module import ParallelModule, ReshardPolicy
from megastack.placement.placement import Ones, Placement, Shard
from megastack.testing.ranks import run_ranks
from tests.gradients.live_bytes import settled_bytes
from tests.gradients.test_bucket import OPTIONS, Bag


class Double(Bag):
    """Parameters in fp64; the output is a weighted sum of their squares."""

    def forward(self) -> Tensor:
        weights = {"a": 1.0, "b": 2.0}
        terms = (weights.get(name[0], 1.0) * p.square().sum() for name, p in self.named_parameters())
        return (self.mesh.rank + 1.0) * sum(terms, torch.zeros(()))


def trained(shape: MeshShape, shard_size: int | None, sharded: bool) -> dict[str, object]:
    """Three steps of two microbatches over odd shapes, partial, copied, tied and unused parameters."""
    from megastack.gradients.buckets import GradientBuckets

    mesh = Mesh.from_environment(shape)
    declared = {
        "a.cut": Placement((4, 3), {Axis.TP: Shard(0)}),
        "b.copied": Placement((4,), {Axis.TP: Shard(0, copies=min(2, shape.tp))}),
        "whole": Placement((5,), init=Ones(), decay=False),
        "partial": Placement((7, 3), partial=frozenset({Axis.TP})),
        "tied": Placement((3, 5)),
        "one": Placement((1,), init=Ones()),
    }
    declared = {name.replace(".", "_"): placement for name, placement in declared.items()}
    bag = Double(mesh, **declared)
    kind = FullyShardedGradients if sharded else GradientBuckets
    gradients = kind([bag], mesh, shard_size=shard_size) if sharded else kind([bag], mesh)
    optimizer = build_optimizer(gradients, OPTIONS["adamw"])
    found: dict[str, object] = {"gradients": [], "norms": []}
    for _ in range(3):
        gradients.zero_()
        for micro in range(2):
            if micro:
                gradients.mark_last_backward(0)
            bag().backward()
        gradients.finish()
        found["gradients"].append({name: x.clone() for name, x in gradients.named_gradients()})
        found["norms"].append(clip_gradients_(gradients, 1.0, mesh).item())
        optimizer.step(0.1)
    with torch.no_grad():
        found["output"] = bag().item()
    return found


@pytest.mark.parametrize(
    ("shape", "shard_size"),
    [(MeshShape(dp=4), None), (MeshShape(dp=4), 2), (MeshShape(dp=2, tp=2), None), (MeshShape(dp=2, pp=2), None)],
    ids=str,
)
def test_gradients_norms_and_updates_equal_those_of_buckets(shape: MeshShape, shard_size: int | None) -> None:
    plain = run_ranks(trained, 4, shape, None, False)
    sharded = run_ranks(trained, 4, shape, shard_size, True)
    for before, after in zip(plain, sharded, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-14)


class Product(ParallelModule):
    """One matrix as a unit."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"weight": Placement((1024, 1024))}

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Chain(ParallelModule):
    """Six matrices as units, and a vector of its own."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.units = torch.nn.ModuleList(Product(mesh) for _ in range(6))
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"scale": Placement((1023,))}

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return (x[:, :1023] * self.scale).sum()


TOLERANCE = 1.05


def held_and_sent(
    gather: str, reduce: str, between: float
) -> tuple[int, list[int], dict[tuple[str, str], tuple[int, int]]]:
    """Parameters, bytes of live storages between two microbatches and after the last, and the traffic of the step."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    chain = Chain(mesh)
    count = sum(parameter.numel() for parameter in chain.parameters())
    units = dict.fromkeys(chain.units, ReshardPolicy.AFTER_FORWARD)
    gradients = FullyShardedGradients([chain], mesh, units=units, gather=gather, reduce=reduce)
    optimizer = build_optimizer(gradients, OPTIONS["adamw"])
    mesh.ledger.reset()
    x = torch.ones(2, 1024)
    chain(x).backward()
    held = [settled_bytes(TOLERANCE * between * count)]
    gradients.mark_last_backward(0)
    chain(x).backward()
    gradients.finish()
    held.append(settled_bytes(TOLERANCE * 16 / 2 * count))
    sent = {key: (total.calls, total.payload_bytes) for key, total in mesh.ledger.records().items()}
    assert optimizer.moments()
    return count, held, sent


UNIT, OWN = 1024 * 1024 * 4, 1024 * 4
BUFFER = 4 / 6  # one of six units: what the last reduction sent


@pytest.mark.parametrize(
    ("gather", "reduce", "between", "gathers", "reductions"),
    [
        ("step", "step", 12 / 2 + 4 + 4, (1, 1), 1),
        ("step", "microbatch", 16 / 2 + 4 + BUFFER, (1, 1), 2),
        ("microbatch", "microbatch", 16 / 2 + BUFFER, (4, 2), 2),
    ],
)
def test_bytes_held_and_traffic(
    gather: str, reduce: str, between: float, gathers: tuple[int, int], reductions: int
) -> None:
    for count, (amid, after), sent in run_ranks(held_and_sent, 2, gather, reduce, between):
        assert count > 5_000_000
        assert after / count == pytest.approx(16 / 2, rel=TOLERANCE - 1)
        assert amid / count == pytest.approx(between, rel=TOLERANCE - 1)
        units, own = gathers
        assert sent == {
            ("dp", "all_gather"): (6 * units + own, 6 * units * UNIT + own * OWN),
            ("dp", "reduce_scatter"): (7 * reductions, reductions * (6 * UNIT + OWN)),
        }


class Lookup(ParallelModule):
    """Rows of a table."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"weight": Placement((64, 1024))}

    def forward(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.weight)


class Looked(Chain):
    """A chain behind a table, which notes how many gathers were started when each product begins to compute."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.table = Lookup(mesh)
        self.started: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.table(ids))

    def note(self, *_: object) -> None:
        self.started.append(self.mesh.ledger.total(op="all_gather").calls)


def gathered(kept: int, lookups: int) -> tuple[list[int], int, int]:
    """Gathers started before each product of a forward, after it, and after the backward.

    The last ``kept`` units are kept until their backward; the backward of the first ``lookups`` reads no parameter.
    """
    mesh = Mesh.from_environment(MeshShape(dp=2))
    chain = Looked(mesh)
    units = [chain.table, *chain.units]
    policies = dict.fromkeys(units, ReshardPolicy.AFTER_FORWARD)
    policies |= dict.fromkeys(units[:lookups], ReshardPolicy.FORWARD_ONLY)
    policies |= dict.fromkeys(units[len(units) - kept :], ReshardPolicy.AFTER_BACKWARD)
    gradients = FullyShardedGradients([chain], mesh, units=policies, gather="microbatch")
    for unit in chain.units:
        unit.register_forward_pre_hook(chain.note)
    gradients.mark_last_backward(0)
    loss = chain(torch.arange(mesh.rank, 60 + mesh.rank))
    chain.note()
    loss.backward()
    gradients.finish()
    chain.note()
    grown = next(shard for shard in gradients.buckets if shard.name == "table.weight").local_gradients
    assert torch.count_nonzero(grown) > 0
    return chain.started[:-2], chain.started[-2], chain.started[-1]


@pytest.mark.parametrize(("kept", "lookups"), [(0, 0), (2, 1)])
def test_units_are_gathered_ahead_and_again_only_where_backward_needs_them(kept: int, lookups: int) -> None:
    for before, forward, whole in run_ranks(gathered, 2, kept, lookups):
        assert before == [4, 5, 6, 7, 8, 8]  # the stage's own, the table, this product and the next
        assert forward == 8
        assert whole == 8 + 7 - kept - lookups


def skipped() -> list[bool]:
    """Whether shards stay as they are where a gradient on one rank is not finite, on every rank, and move otherwise."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    bag = Double(mesh, a=Placement((4,)), b=Placement((3, 3)))
    gradients = FullyShardedGradients([bag], mesh)
    optimizer = build_optimizer(gradients, OPTIONS["adamw"])
    stayed = []
    for factor in (float("nan") if mesh.rank else 1.0, 1.0):
        before = [shard.local_parameters.clone() for shard in gradients.buckets]
        gradients.zero_()
        gradients.mark_last_backward(0)
        (bag() * factor).backward()
        gradients.finish()
        norm = clip_gradients_(gradients, 1.0, mesh)
        optimizer.step(0.1, found_inf=is_nonfinite(norm))
        after = [shard.local_parameters for shard in gradients.buckets]
        stayed.append(all(torch.equal(x, y) for x, y in zip(before, after, strict=True)))
    return stayed


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    assert run_ranks(skipped, 2) == [[True, False]] * 2


def errors() -> str:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    one, other = Bag(mesh, shared=Placement((4,)), scalar=Placement(())), Bag(mesh, shared=Placement((4,)))
    other.shared = one.shared
    with pytest.raises(PlacementError) as caught:
        FullyShardedGradients([one, other], mesh)
    return str(caught.value)


def test_parameters_that_cannot_be_sharded_are_errors_by_name() -> None:
    for message in run_ranks(errors, 2):
        assert "scalar: a scalar cannot be cut over data ranks; declare it with shape (1,)" in message
        assert "shared: two stages of one rank share it" in message
