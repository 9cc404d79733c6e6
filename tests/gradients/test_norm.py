"""The norm counts each element of the model once, and a non-finite value on one rank reaches all ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megastack.gradients import norm
from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.norm import clip_gradients_, grad_norm, is_nonfinite
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement, Shard
from megastack.testing.ranks import run_ranks


class Bag(ParallelModule):
    """Parameters without a layer, whose gradients are written by hand."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype = torch.float64, **placements: Placement) -> None:
        super().__init__(mesh)
        self.declared = placements
        self.create_parameters()
        self.to(dtype)

    def placements(self) -> dict[str, Placement]:
        return self.declared


def vector(size: int, **options: object) -> Placement:
    return Placement((size,), init=Ones(), **options)


def write(buckets: GradientBuckets, **values: float) -> None:
    for name, gradient in buckets.named_gradients():
        gradient.fill_(values.get(name, 0.0))


def test_norm_and_clipping_follow_torch_on_one_rank() -> None:
    bag = Bag(Mesh.single(), a=vector(3), b=vector(5, decay=False))
    buckets = GradientBuckets([bag], bag.mesh)
    values = torch.arange(1.0, 9.0, dtype=torch.float64)
    for (_, gradient), part in zip(buckets.named_gradients(), values.split([5, 3]), strict=True):
        gradient.copy_(part)
    reference = [torch.nn.Parameter(torch.ones(8, dtype=torch.float64))]
    reference[0].grad = values.clone()
    expected = torch.nn.utils.clip_grad_norm_(reference, 2.0)
    found = clip_gradients_(buckets, 2.0, bag.mesh)
    assert found.item() == pytest.approx(expected.item(), rel=1e-14)
    clipped = torch.cat([gradient for _, gradient in buckets.named_gradients()])
    torch.testing.assert_close(clipped, reference[0].grad, rtol=1e-14, atol=0)


def test_a_small_norm_and_no_limit_leave_gradients_unchanged() -> None:
    bag = Bag(Mesh.single(), a=vector(4))
    buckets = GradientBuckets([bag], bag.mesh)
    write(buckets, a=3.0)
    for limit in (6.1, None, math.inf):
        assert clip_gradients_(buckets, limit, bag.mesh).item() == 6.0
        assert (buckets.buckets[0].gradients == 3.0).all()


def test_a_large_fp32_bucket_has_the_norm_of_its_fp64_copy() -> None:
    bag = Bag(Mesh.single(), dtype=torch.float32, a=vector(1_000_003))
    buckets = GradientBuckets([bag], bag.mesh)
    flat = buckets.buckets[0].gradients
    flat[:1_000_003] = torch.linspace(0.0, 1.0, 1_000_003)
    expected = flat.double().norm().item()
    assert grad_norm(buckets, bag.mesh).item() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_takes_all_norms_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    bag = Bag(Mesh.single(), dtype=dtype, a=vector(3000), b=vector(5, decay=False), c=vector(0, decay=False))
    buckets = GradientBuckets([bag], bag.mesh, bucket_size=1)
    for bucket in buckets.buckets:
        bucket.gradients.uniform_()
    monkeypatch.setattr(norm, "_norms_by_row", norm._norms_at_once)
    expected = torch.cat([bucket.gradients.double() for bucket in buckets.buckets]).norm()
    torch.testing.assert_close(grad_norm(buckets, bag.mesh), expected, rtol=1e-14, atol=0)
    buckets.buckets[-1].gradients[0] = math.nan
    assert is_nonfinite(grad_norm(buckets, bag.mesh)) == 1


def norms_over_tensor_ranks() -> float:
    mesh = Mesh.from_environment(MeshShape(dp=2, tp=4))
    bag = Bag(
        mesh,
        cut=vector(8, shards={Axis.TP: Shard(0)}),
        copied=vector(8, shards={Axis.TP: Shard(0, copies=2)}),
        whole=vector(8),
        partial=vector(8, partial=frozenset({Axis.TP})),
    )
    buckets = GradientBuckets([bag], mesh)
    write(buckets, cut=1.0, copied=10.0, whole=100.0, partial=1000.0)
    return grad_norm(buckets, mesh).item()


def test_each_element_counts_once_whatever_its_placement() -> None:
    expected = math.sqrt(8 * (1 + 10**2 + 100**2 + 1000**2))
    assert run_ranks(norms_over_tensor_ranks, 8) == [pytest.approx(expected, rel=1e-14)] * 8


def norm_of_a_tied_parameter() -> tuple[float, float, int]:
    mesh = Mesh.from_environment(MeshShape(pp=2))
    bag = Bag(mesh, **{"tied": vector(4), f"own{mesh.rank}": vector(2)})
    buckets = GradientBuckets([bag], mesh)
    write(buckets, tied=3.0)
    mesh.ledger.reset()
    found = clip_gradients_(buckets, 3.0, mesh).item()
    scaled = dict(buckets.named_gradients())["tied"][0].item()
    return found, scaled, mesh.ledger.total("pp", "all_reduce").wire_bytes


def test_a_tied_parameter_counts_once_and_both_copies_are_clipped() -> None:
    for found, scaled, wire in run_ranks(norm_of_a_tied_parameter, 2):
        assert found == 6.0
        assert scaled == pytest.approx(3.0 * 0.5, rel=1e-6)
        assert wire == 8


def stages_without_parameters() -> tuple[float, float]:
    mesh = Mesh.from_environment(MeshShape(pp=2, dp=2))
    bag = Bag(mesh, a=vector(4)) if mesh.coordinates[Axis.PP] == 1 else Bag(mesh)
    buckets = GradientBuckets([bag], mesh)
    write(buckets, a=0.5)
    buckets.finish()
    found = clip_gradients_(buckets, 1.0, mesh)
    return found.item(), clip_gradients_(buckets, None, mesh).item()


def test_a_stage_without_parameters_takes_part() -> None:
    for before, after in run_ranks(stages_without_parameters, 4):
        assert before == 2.0 and after == pytest.approx(1.0, rel=1e-5)


def a_bad_value_on_one_rank(bad: float, name: str) -> tuple[bool, float, bool]:
    """NaN or infinity in one gradient of the last rank, after the reduction; it does not own ``whole``."""
    mesh = Mesh.from_environment(MeshShape(pp=2, tp=2))
    stage = mesh.coordinates[Axis.PP]
    bag = Bag(mesh, **{f"whole{stage}": vector(4), f"cut{stage}": vector(4, shards={Axis.TP: Shard(0)})})
    buckets = GradientBuckets([bag], mesh)
    write(buckets, **{f"whole{stage}": 9.0, f"cut{stage}": 9.0})
    before = [bucket.gradients.clone() for bucket in buckets.buckets]
    if mesh.rank == 3:
        dict(buckets.named_gradients())[f"{name}{stage}"][1] = bad
        before = [bucket.gradients.clone() for bucket in buckets.buckets]
    found = clip_gradients_(buckets, 1.0, mesh)
    return math.isfinite(found.item()), is_nonfinite(found).item(), _unchanged(buckets, before)


def _unchanged(buckets: GradientBuckets, before: list[Tensor]) -> bool:
    return all(
        torch.equal(bucket.gradients.nan_to_num(nan=-1.0), old.nan_to_num(nan=-1.0))
        for bucket, old in zip(buckets.buckets, before, strict=True)
    )


@pytest.mark.parametrize(("bad", "name"), [(math.nan, "cut"), (math.inf, "cut"), (math.nan, "whole")])
def test_one_bad_value_is_seen_on_all_ranks_and_scales_nothing(bad: float, name: str) -> None:
    assert run_ranks(a_bad_value_on_one_rank, 4, bad, name) == [(False, 1.0, True)] * 4
