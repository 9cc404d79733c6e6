"""RMSNorm and LayerNorm against plain torch; their gradients on a split sequence; what precision they compute in."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.layers.norm import LayerNorm, RMSNorm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks
from tests.layers.layer_parity import assert_close, assert_same_gradients, piece, randn, randomised, split_like

B, S, D = 2, 4, 6
NORMS = [RMSNorm, LayerNorm]


def plain(layer: RMSNorm | LayerNorm, x: Tensor) -> Tensor:
    if isinstance(layer, LayerNorm):
        return F.layer_norm(x, (D,), layer.weight, layer.bias, 1e-3)
    return F.rms_norm(x, (D,), layer.weight, 1e-3)


def parity(kind: type, tp: int, sequence_parallel: bool) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    whole = randomised(kind(D, Mesh.single(), eps=1e-3))
    layer = split_like(kind(D, mesh, eps=1e-3, sequence_parallel=sequence_parallel), whole)
    x, probe = randn(B, S, D).requires_grad_(), randn(B, S, D, seed=1)
    expected = plain(whole, x)
    (expected * probe).sum().backward()
    local_x = piece(x, mesh, 1) if sequence_parallel else x.detach().clone().requires_grad_()
    out = layer(local_x)
    assert_close(out, piece(expected, mesh, 1) if sequence_parallel else expected)
    (out * (piece(probe, mesh, 1).detach() if sequence_parallel else probe)).sum().backward()
    assert_close(local_x.grad, piece(x.grad, mesh, 1) if sequence_parallel else x.grad)
    assert_same_gradients(layer, whole)
    assert not mesh.ledger.records() or sequence_parallel  # only this test's own sum of partial gradients


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, True), (2, False), (2, True), (4, True)])
def test_outputs_and_gradients_equal_plain_torch(kind: type, tp: int, sequence_parallel: bool) -> None:
    run_ranks(parity, tp, kind, tp, sequence_parallel)


@pytest.mark.parametrize("kind", NORMS)
def test_low_precision_is_normalised_in_fp32(kind: type) -> None:
    """Rounded once, at the end: a weight that bf16 would round to one still counts."""
    x = (3 + torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))).bfloat16()
    layer = kind(4096, Mesh.single())
    torch.nn.init.constant_(layer.weight, 1 + 2**-9)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    exact = layer.double()(x.double())
    assert (out == exact.bfloat16()).double().mean() > 0.99
    assert layer.bfloat16()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_stays_as_it_is(dtype: torch.dtype) -> None:
    layer = RMSNorm(D, Mesh.single(), eps=1e-3).to(dtype)
    x = randn(B, S, D).to(dtype)
    assert torch.equal(layer(x), F.rms_norm(x, (D,), layer.weight, 1e-3))


@pytest.mark.parametrize("kind", NORMS)
def test_gradients_are_declared_partial_where_the_input_is_split(kind: type) -> None:
    for sequence_parallel in (False, True):
        placements = kind(D, Mesh.single(), sequence_parallel=sequence_parallel).placements()
        assert set(placements) == ({"weight", "bias"} if kind is LayerNorm else {"weight"})
        for placement in placements.values():
            assert placement.partial == ({Axis.TP} if sequence_parallel else frozenset())
            assert (placement.shards, placement.decay) == ({}, False)


def test_values_at_the_start_change_nothing() -> None:
    layer = LayerNorm(D, Mesh.single())
    assert torch.equal(layer.weight, torch.ones(D))
    assert torch.equal(layer.bias, torch.zeros(D))
