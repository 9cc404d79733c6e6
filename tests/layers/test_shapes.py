"""Inputs of any number of dims, and without tokens: what torch's layers give, or a clear error, on one rank or two."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.errors import PlacementError
from megastack.layers.attention import ParallelAttention
from megastack.layers.embedding import LearnedPositions, VocabParallelEmbedding, VocabParallelHead
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear
from megastack.layers.loss import vocab_parallel_cross_entropy
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import LayerNorm, RMSNorm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.placement.module import ParallelModule
from megastack.testing.ranks import run_ranks
from megastack.weight_gradients import deferring, weight_gradient_scope
from tests.layers.layer_parity import assert_close, assert_same_gradients, piece, randn, randomised, split_like

D, V = 6, 9
SHAPES = [(), (4,), (2, 4), (3, 2, 4), (0,), (2, 0), (0, 4)]
"""What stands before the features."""
Plain = Callable[[nn.Module, Tensor], Tensor]


def swiglu(layer: nn.Module, x: Tensor) -> Tensor:
    gate, up = (F.linear(x, weight) for weight in layer.up.weight)
    return F.linear(F.silu(gate) * up, layer.down.weight)


def gelu(layer: nn.Module, x: Tensor) -> Tensor:
    inner = F.gelu(F.linear(x, layer.up.weight, layer.up.bias), approximate="tanh")
    return F.linear(inner, layer.down.weight, layer.down.bias)


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, getattr(layer, "bias", None))


LAYERS: dict[str, tuple[Callable[[Mesh, bool], ParallelModule], Plain]] = {
    "column": (lambda mesh, sp: ColumnParallelLinear(D, 4, mesh, bias=True, sequence_parallel=sp), linear),
    "row": (lambda mesh, sp: RowParallelLinear(D, 4, mesh, bias=True, sequence_parallel=sp), linear),
    "swiglu": (lambda mesh, sp: ParallelMLP(D, 4, mesh, sequence_parallel=sp), swiglu),
    "gelu": (lambda mesh, sp: ParallelMLP(D, 4, mesh, activation="gelu", bias=True, sequence_parallel=sp), gelu),
    "head": (lambda mesh, sp: VocabParallelHead(8, D, mesh, vocab_multiple=1, sequence_parallel=sp), linear),
    "rms": (
        lambda mesh, sp: RMSNorm(D, mesh, sequence_parallel=sp),
        lambda layer, x: F.rms_norm(x, (D,), layer.weight, layer.eps),
    ),
    "layer": (
        lambda mesh, sp: LayerNorm(D, mesh, sequence_parallel=sp),
        lambda layer, x: F.layer_norm(x, (D,), layer.weight, layer.bias, layer.eps),
    ),
    "embedding": (
        lambda mesh, sp: VocabParallelEmbedding(8, D, mesh, vocab_multiple=1, sequence_parallel=sp),
        lambda layer, ids: F.embedding(ids, layer.weight),
    ),
    "positions": (
        lambda mesh, sp: LearnedPositions(8, D, mesh, sequence_parallel=sp),
        lambda layer, ids: F.embedding(ids, layer.weight),
    ),
}
IDS = ("embedding", "positions")
BY_FEATURE_IN, BY_FEATURE_OUT = ("row",), ("column", "head")


def input_of(name: str, shape: tuple[int, ...]) -> Tensor:
    if name in IDS:
        return torch.arange(prod(shape)).view(shape) % 8
    return randn(*shape, D).requires_grad_()


def local(x: Tensor, mesh: Mesh, sp: bool, by_feature: bool) -> Tensor:
    """This rank's part: cut by features, or along the sequence, or whole."""
    return piece(x, mesh, -1) if by_feature else piece(x, mesh, -2) if sp else x.detach().clone().requires_grad_()


def backward(mesh: Mesh, layer: nn.Module, function: Callable[[], Tensor], how: str) -> None:
    """Plain, or as in a step: in place or put off."""
    if how == "plain":
        return function().backward()
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with weight_gradient_scope():
        loss = function()
        if how == "step":
            return loss.backward()
        with deferring() as deferred:
            loss.backward()
        deferred.accumulate()
    return None


def case(mesh: Mesh, name: str, shape: tuple[int, ...], sp: bool, how: str) -> None:
    make, plain = LAYERS[name]
    whole = randomised(make(Mesh.single(), sp))
    layer = split_like(make(mesh, sp), whole)
    x = input_of(name, shape)
    expected = plain(whole, x)
    probe = randn(*expected.shape, seed=1)
    (expected * probe).sum().backward()
    cut_in, cut_out = name in BY_FEATURE_IN, name in BY_FEATURE_OUT
    here = x if name in IDS else local(x, mesh, sp, cut_in)
    there = local(probe, mesh, sp, cut_out).detach()
    found: list[Tensor] = []

    def loss() -> Tensor:
        found.append(layer(here))
        return (found[0] * there).sum()

    backward(mesh, layer, loss, how)
    assert_close(found[0], local(expected, mesh, sp, cut_out))
    if name not in IDS:
        assert here.grad is not None and x.grad is not None
        assert_close(here.grad, local(x.grad, mesh, sp, cut_in))
    assert_same_gradients(layer, whole)


def cases(tp: int, sp: bool, how: str) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    for name in LAYERS:
        for shape in SHAPES:
            try:
                if sp and not shape and name not in ("rms", "layer"):
                    with pytest.raises(PlacementError, match=r"must have at least . dims?; use \(…, S"):
                        LAYERS[name][0](mesh, sp).double()(input_of(name, shape))
                elif not sp or shape:
                    case(mesh, name, shape, sp, how)
            except BaseException as error:
                error.add_note(f"{name} {shape}")
                raise


@pytest.mark.parametrize("how", ["plain", "step", "split"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (1, True), (2, False), (2, True)])
def test_any_number_of_dims_and_of_tokens(tp: int, sp: bool, how: str) -> None:
    run_ranks(cases, tp, tp, sp, how)


def without_features(tp: int) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    for layer in (ColumnParallelLinear(1, 2, mesh), RowParallelLinear(2, 2, mesh)):
        with pytest.raises(PlacementError, match=r"input of shape \(\): must have at least 1 dims?; use \(…, features"):
            layer(torch.tensor(1.0))


def losses(tp: int) -> list[Any]:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    found = []
    for shape in SHAPES:
        logits, labels = randn(*shape, 8).requires_grad_(), torch.arange(prod(shape)).view(shape) % 8
        own = piece(logits, mesh, -1)
        loss, tokens = vocab_parallel_cross_entropy(own, labels, mesh, vocab=8, label_smoothing=0.1)
        loss.backward()
        expected = F.cross_entropy(logits.view(-1, 8), labels.view(-1), reduction="sum", label_smoothing=0.1)
        expected.backward()
        assert_close(loss, expected)
        assert own.grad is not None and logits.grad is not None
        assert_close(own.grad, piece(logits.grad, mesh, -1))
        found.append(int(tokens))
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_losses_of_any_number_of_dims_and_of_tokens(tp: int) -> None:
    assert run_ranks(losses, tp, tp) == [[prod(shape) for shape in SHAPES]] * tp


@pytest.mark.parametrize("tp", [1, 2])
def test_numbers_without_features_are_refused(tp: int) -> None:
    run_ranks(without_features, tp, tp)


def attended(tp: int, sp: bool) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    layer = ParallelAttention(D, 2, mesh, head_dim=4, sequence_parallel=sp)
    for shape in ((D,), (4, D), (1, 2, 4, D)):
        with pytest.raises(PlacementError, match=r"must be \(B, S, D\)"):
            layer(torch.randn(shape))
    for shape in ((0, 4, D), (2, 0, D)):
        x = torch.randn(shape, requires_grad=True)
        out = layer(x)
        assert out.shape == shape
        out.sum().backward()
        assert x.grad is not None and x.grad.shape == shape


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_attention_takes_rows_of_tokens_alone(tp: int, sp: bool) -> None:
    run_ranks(attended, tp, tp, sp)
