"""Flat buckets: where gradients accumulate, when their reductions start, and over which ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megastack.errors import ConfigError, PlacementError
from megastack.gradients.buckets import GradientBuckets, default_bucket_size
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement, Shard
from megastack.testing.ranks import run_ranks


class Bag(ParallelModule):
    """Parameters without a layer, whose gradients the caller sets."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.float64, **placements: Placement) -> None:
        super().__init__(mesh)
        self.declared = placements
        self.create_parameters()
        self.to(dtype)

    def placements(self) -> dict[str, Placement]:
        return self.declared

    def backward(self, **gradients: float) -> None:
        sum((self.get_parameter(name) * value).sum() for name, value in gradients.items()).backward()


class Chain(ParallelModule):
    """Weights used one after another, so that the gradient of the first comes last."""

    def __init__(self, mesh: Mesh, depth: int = 3, width: int = 4) -> None:
        super().__init__(mesh)
        self.depth, self.width = depth, width
        self.create_parameters()
        self.double()

    def placements(self) -> dict[str, Placement]:
        return {f"w{layer}": Placement((self.width, self.width)) for layer in range(self.depth)}

    def forward(self, hidden_BD: Tensor) -> Tensor:
        for layer in range(self.depth):
            hidden_BD = hidden_BD @ self.get_parameter(f"w{layer}")
        return hidden_BD.sum()


def vector(size: int = 2, **options: object) -> Placement:
    return Placement((size,), init=Ones(), **options)


def gradients(buckets: GradientBuckets) -> dict[str, float]:
    """The first element of each gradient, after checking that all are equal."""
    return {name: _only(gradient) for name, gradient in buckets.named_gradients()}


def _only(gradient: Tensor) -> float:
    assert (gradient == gradient.flatten()[0]).all()
    return gradient.flatten()[0].item()


def names(buckets: GradientBuckets) -> list[list[str]]:
    return [[slot.name for slot in bucket.slots] for bucket in buckets.buckets]


# One rank: layout and accumulation.


def test_parameters_and_gradients_become_aligned_views_and_keep_their_values() -> None:
    bag = Bag(Mesh.single(), a=Placement((3,)), b=Placement((5,)), c=Placement((7, 2)))
    before = {name: parameter.detach().clone() for name, parameter in bag.named_parameters()}
    (bucket,) = GradientBuckets([bag], Mesh.single()).buckets
    for name, view in bucket.views(bucket.parameters):
        parameter = bag.get_parameter(name)
        assert torch.equal(view, before[name]) and parameter.data_ptr() == view.data_ptr()
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        assert parameter.data_ptr() % 16 == parameter.grad.data_ptr() % 16 == 0
    assert [slot.offset for slot in bucket.slots] == [0, 14, 20]
    bucket.parameters.fill_(2.0)
    assert (bag.get_parameter("b") == 2).all()


def test_gradients_accumulate_over_microbatches_in_place() -> None:
    bag = Bag(Mesh.single(), a=vector(), b=vector())
    buckets = GradientBuckets([bag], bag.mesh)
    bag.backward(a=1.0, b=2.0)
    bag.backward(a=10.0)
    buckets.finish()
    assert gradients(buckets) == {"a": 11.0, "b": 2.0}
    buckets.zero_()
    bag.backward(b=3.0)
    buckets.finish()
    assert gradients(buckets) == {"a": 0.0, "b": 3.0}


@pytest.mark.parametrize("in_place", [True, False])
def test_low_precision_gradients_accumulate_in_fp32(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place where torch allows a gradient of another dtype, otherwise by a hook."""
    monkeypatch.setattr("megastack.gradients.buckets.HAS_GRAD_DTYPE", in_place)
    bag = Bag(Mesh.single(), dtype=torch.bfloat16, a=vector())
    buckets = GradientBuckets([bag], bag.mesh)
    bag.backward(a=1.0)
    for _ in range(100):
        bag.backward(a=1 / 1024)
    buckets.finish()
    assert buckets.buckets[0].gradients.dtype == torch.float32
    assert gradients(buckets) == {"a": 1 + 100 / 1024}
    assert (bag.get_parameter("a").grad is not None) == in_place


def test_a_gradient_is_accumulated_even_if_grad_was_cleared() -> None:
    bag = Bag(Mesh.single(), a=vector())
    buckets = GradientBuckets([bag], bag.mesh)
    bag.zero_grad(set_to_none=True)
    bag.backward(a=5.0)
    bag.backward(a=1.0)
    assert gradients(buckets) == {"a": 6.0}


def test_buckets_run_in_reverse_order_of_use_and_are_closed_at_their_size() -> None:
    bag = Bag(Mesh.single(), a=vector(4), b=vector(40), c=vector(4), d=vector(4), e=vector(4))
    assert names(GradientBuckets([bag], bag.mesh, bucket_size=8)) == [["e", "d"], ["c"], ["b"], ["a"]]
    assert names(GradientBuckets([bag], bag.mesh)) == [["e", "d", "c", "b", "a"]]


def test_buckets_grow_with_the_data_group_on_a_gpu() -> None:
    assert [default_bucket_size(torch.device("cuda"), ranks) for ranks in (1, 64)] == [40_000_000, 64_000_000]
    assert default_bucket_size(torch.device("cpu"), 64) * 4 == 25 * 2**20


def test_decay_and_dtype_separate_buckets_ordered_by_what_completes_first() -> None:
    bag = Bag(Mesh.single(), a=vector(), b=vector(decay=False), c=vector(), d=vector(decay=False))
    assert names(GradientBuckets([bag], bag.mesh)) == [["d", "b"], ["c", "a"]]
    bag.get_parameter("b").data = bag.get_parameter("b").data.float()
    assert names(GradientBuckets([bag], bag.mesh)) == [["d"], ["b"], ["c", "a"]]


def test_a_frozen_parameter_is_in_no_bucket() -> None:
    bag = Bag(Mesh.single(), a=vector(), b=vector())
    bag.get_parameter("a").requires_grad_(False)
    assert names(GradientBuckets([bag], bag.mesh)) == [["b"]]


def test_a_name_on_two_stages_of_one_rank_is_one_parameter() -> None:
    mesh = Mesh.single()
    first, last = Bag(mesh, shared=vector(), a=vector()), Bag(mesh, b=vector(), shared=vector())
    buckets = GradientBuckets([first, last], mesh)
    assert names(buckets) == [["b", "a", "shared"]]
    first.backward(shared=1.0, a=1.0)
    last.backward(shared=2.0)
    buckets.finish()
    assert gradients(buckets) == {"b": 0.0, "a": 1.0, "shared": 3.0}
    buckets.buckets[0].parameters.fill_(7.0)
    assert (first.get_parameter("shared") == 7).all() and (last.get_parameter("shared") == 7).all()


def test_an_unavailable_level_or_an_undeclared_parameter_is_an_error() -> None:
    bag = Bag(Mesh.single(), a=vector())
    with pytest.raises(ConfigError, match=r"zero.stage=2: buckets shard .* use 0 or 1"):
        GradientBuckets([bag], bag.mesh, zero=2)
    with pytest.raises(PlacementError, match="weight"):
        GradientBuckets([nn.Linear(2, 2)], bag.mesh)


def test_a_gradient_after_its_reduction_started_is_an_error() -> None:
    bag = Bag(Mesh.single(), a=vector())
    buckets = GradientBuckets([bag], bag.mesh)
    buckets.mark_last_backward(0)
    bag.backward(a=1.0)
    with pytest.raises(AssertionError, match="mark_last_backward"):
        bag.backward(a=1.0)
    buckets.finish()
    with pytest.raises(AssertionError, match="once per step"):
        buckets.finish()
    with pytest.raises(AssertionError, match="zero_"):
        bag.backward(a=1.0)


# Several ranks: sums, their order and their traffic.


def sums_over_data_ranks(shape: MeshShape) -> tuple[dict[str, float], dict]:
    mesh = Mesh.from_environment(shape)
    bag = Bag(mesh, a=vector(3), b=vector(4, decay=False))
    buckets = GradientBuckets([bag], mesh)
    mesh.ledger.reset()
    bag.backward(a=1.0, b=mesh.rank + 1.0)
    buckets.mark_last_backward(0)
    bag.backward(a=1.0)
    buckets.finish()
    return gradients(buckets), dict(mesh.ledger.records())


def test_gradients_are_summed_over_dp_and_cp_once_per_step_and_counted() -> None:
    for found, records in run_ranks(sums_over_data_ranks, 4, MeshShape(dp=2, cp=2)):
        assert found == {"a": 8.0, "b": 10.0}
        (traffic,) = records.values()
        assert list(records) == [("dp", "all_reduce")]
        assert (traffic.calls, traffic.payload_bytes) == (2, 8 * 4 + 8 * 4)  # three elements fill up to four
        assert traffic.wire_bytes == 2 * 3 * traffic.payload_bytes // 4


def sums_over_tensor_ranks() -> tuple[dict[str, float], int]:
    mesh = Mesh.from_environment(MeshShape(dp=2, tp=4))
    bag = Bag(
        mesh,
        cut=vector(4, shards={Axis.TP: Shard(0)}),
        copied=vector(4, shards={Axis.TP: Shard(0, copies=2)}),
        whole=vector(4),
        partial=vector(4, partial=frozenset({Axis.TP})),
    )
    buckets = GradientBuckets([bag], mesh)
    mesh.ledger.reset()
    value = float(10 ** mesh.coordinates[Axis.TP])
    bag.backward(cut=value, copied=value, whole=1.0, partial=value)
    buckets.finish()
    return gradients(buckets), mesh.ledger.total("tp").calls


def test_what_is_summed_over_tp_follows_from_the_placement() -> None:
    for rank, (found, calls) in enumerate(run_ranks(sums_over_tensor_ranks, 8)):
        pair = 22.0 if rank % 4 < 2 else 2200.0
        assert found == {"partial": 2222.0, "whole": 2.0, "copied": pair, "cut": 2.0 * 10 ** (rank % 4)}
        assert calls == 2


def starts_under_the_backward() -> list[int]:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    chain = Chain(mesh)
    buckets = GradientBuckets([chain], mesh, bucket_size=1)
    assert names(buckets) == [["w2"], ["w1"], ["w0"]]
    seen: list[int] = []
    chain.get_parameter("w0").register_hook(lambda gradient: seen.append(mesh.ledger.total("dp").calls))
    hidden_BD = torch.ones(2, 4, dtype=torch.float64)
    chain(hidden_BD).backward()
    buckets.mark_last_backward(0)
    chain(hidden_BD).backward()
    seen.append(mesh.ledger.total("dp").calls)
    buckets.finish()
    return [*seen, mesh.ledger.total("dp").calls]


def test_reductions_start_before_the_last_backward_ends_and_not_before_it() -> None:
    assert run_ranks(starts_under_the_backward, 2) == [[0, 2, 3, 3]] * 2


def starts_when_some_gradients_are_pending() -> list[int]:
    """Split backwards: before the last one, all gradients are complete except the ones it computes."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    bag = Bag(mesh, w=vector(), norm=vector(), v=vector())
    buckets = GradientBuckets([bag], mesh, bucket_size=1)
    assert names(buckets) == [["v"], ["norm"], ["w"]]
    calls = []

    def count() -> None:
        calls.append(mesh.ledger.total("dp").calls)

    bag.backward(v=1.0, norm=1.0)
    bag.backward(norm=1.0)
    bag.backward(w=1.0)
    count()
    buckets.mark_last_backward(0, {bag.get_parameter("w"), bag.get_parameter("v")})
    count()
    bag.backward(v=1.0)
    count()
    bag.backward(w=1.0)
    count()
    buckets.finish()
    count()
    assert gradients(buckets) == {"v": 4.0, "norm": 4.0, "w": 4.0}
    return calls


def test_buckets_without_pending_gradients_start_at_once() -> None:
    assert run_ranks(starts_when_some_gradients_are_pending, 2) == [[0, 0, 2, 3, 3]] * 2


def uses_parameters_in_another_order_on_each_rank() -> dict[str, float]:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    bag = Bag(mesh, a=vector(2), unused=vector(2), b=vector(2), c=vector(2))
    buckets = GradientBuckets([bag], mesh, bucket_size=1)
    order = ["a", "b", "c"] if mesh.rank == 0 else ["c", "a", "b"]
    loss = torch.zeros((), dtype=torch.float64)
    for place, name in enumerate(order):
        loss = (loss + bag.get_parameter(name).sum() * 10.0**place) * 1.0
    buckets.mark_last_backward(0)
    loss.backward()
    buckets.finish()
    return gradients(buckets)


def test_order_of_use_may_differ_between_ranks_and_parameters_may_be_unused() -> None:
    found = {"a": 1.0 + 10.0, "b": 10.0 + 100.0, "c": 100.0 + 1.0, "unused": 0.0}
    assert run_ranks(uses_parameters_in_another_order_on_each_rank, 2) == [found] * 2


def marks_two_stages() -> list[int]:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    first, last = Bag(mesh, shared=vector(), a=vector()), Bag(mesh, b=vector(), shared=vector())
    buckets = GradientBuckets([first, last], mesh, bucket_size=1)
    calls = [mesh.ledger.total("dp").calls]
    for stage, bag, more in ((1, last, {"b": 1.0}), (0, first, {"a": 1.0})):
        bag.backward(shared=1.0, **more)
        buckets.mark_last_backward(stage)
        bag.backward(shared=1.0, **more)
        calls.append(mesh.ledger.total("dp").calls)
    buckets.finish()
    assert gradients(buckets) == {"b": 4.0, "a": 4.0, "shared": 8.0}
    return calls


def test_a_marked_stage_starts_only_its_own_buckets() -> None:
    assert run_ranks(marks_two_stages, 2) == [[0, 1, 3]] * 2


# Tied parameters.


def tied_pair(reverse: bool) -> tuple[dict[str, float], dict]:
    """Copy gradients 1, 2 on the first stage and 3, 4 on the last, as the mean over two data ranks."""
    mesh = Mesh.from_environment(MeshShape(pp=2, dp=2))
    stage, replica = mesh.coordinates[Axis.PP], mesh.coordinates[Axis.DP]
    tied = {"tied": vector(4), "other": vector(4)}
    own = {f"own{stage}": vector(6)}
    bag = Bag(mesh, **(tied | own if stage == 0 or not reverse else own | dict(reversed(tied.items()))))
    buckets = GradientBuckets([bag], mesh)
    mesh.ledger.reset()
    bag.backward(tied=(1.0 + 2 * stage + replica) / 2, other=1.0, **{f"own{stage}": 1.0})
    buckets.finish()
    return gradients(buckets), dict(mesh.ledger.records())


@pytest.mark.parametrize("reverse", [False, True])
def test_copies_of_a_tied_parameter_are_summed_after_the_data_group(reverse: bool) -> None:
    for rank, (found, records) in enumerate(run_ranks(tied_pair, 4, reverse)):
        assert found == {"tied": 5.0, "other": 4.0, f"own{rank // 2}": 2.0}
        assert {key: traffic.calls for key, traffic in records.items()} == {
            ("dp", "all_reduce"): 2,
            ("pp", "all_reduce"): 1,
        }
        assert records["pp", "all_reduce"].wire_bytes == 2 * 4 * 8


def middle_stages_stay_out() -> tuple[float, int]:
    mesh = Mesh.from_environment(MeshShape(pp=4))
    stage = mesh.coordinates[Axis.PP]
    held = {"tied": vector()} if stage in (0, 3) else {}
    bag = Bag(mesh, **held, **{f"own{stage}": vector()})
    buckets = GradientBuckets([bag], mesh)
    mesh.ledger.reset()
    bag.backward(**dict.fromkeys((*held, f"own{stage}"), 1.0 + stage))
    buckets.finish()
    return gradients(buckets).get("tied", -1.0), mesh.ledger.total("pp").calls


def test_only_the_stages_that_hold_a_tied_parameter_sum_it() -> None:
    assert run_ranks(middle_stages_stay_out, 4) == [(5.0, 1), (-1.0, 0), (-1.0, 0), (5.0, 1)]
