"""Gradients of bf16 parameters accumulate in fp32, with no rounding to bf16 in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megastack.gradients.buckets import GradientBuckets
from megastack.layers.embedding import VocabParallelEmbedding, VocabParallelHead
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.recompute import recompute
from megastack.testing.ranks import run_ranks
from megastack.weight_gradients import HAS_GRAD_DTYPE, WORTH_ADDING_IN_PLACE, deferring, weight_gradient_scope

V, D, F, MICROBATCHES = 16, 24, 40, 5


class Tied(nn.Module):
    """An embedding, an MLP with biases, and a head with the weight of the embedding."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.embedding = VocabParallelEmbedding(V, D, mesh, vocab_multiple=1)
        self.up = ColumnParallelLinear(D, (4, F // 4), mesh, bias=True)
        self.down = RowParallelLinear(F, D, mesh, bias=True)
        self.head = VocabParallelHead(V, D, mesh, vocab_multiple=1, weight=self.embedding.weight)
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.to(torch.bfloat16)

    def forward(self, ids_BS: Tensor) -> Tensor:
        hidden = self.embedding(ids_BS)
        return self.head(hidden + self.down(torch.tanh(self.up(hidden)).flatten(-2)))


def reference(model: Tied) -> dict[str, Tensor]:
    """Sums the products that the modules' backwards compute from bf16 operands, in fp64, by hooks on the modules."""
    found = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}

    def on_gradient(add: Callable[[Tensor, Tensor], object]) -> Callable[..., None]:
        """A forward hook that calls ``add(input, output gradient)`` with rows in the backward."""

        def record(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            def hook(grad: Tensor) -> None:
                add(args[0].detach(), grad.flatten(2).flatten(0, 1).double())

            if output.requires_grad:  # not while it is recomputed
                output.register_hook(hook)

        return record

    def linear(weight: str, bias: str | None = None) -> Callable[..., None]:
        def add(x: Tensor, rows: Tensor) -> None:
            found[weight] += (rows.T @ x.flatten(0, -2).double()).view_as(found[weight])
            if bias is not None:
                found[bias] += rows.sum(0).view_as(found[bias])

        return on_gradient(add)

    table = found["embedding.weight"]
    model.embedding.register_forward_hook(
        on_gradient(lambda ids, rows: table.index_add_(0, ids.flatten() % len(table), rows))
    )
    model.up.register_forward_hook(linear("up.weight", "up.bias"))
    model.down.register_forward_hook(linear("down.weight", "down.bias"))
    model.head.register_forward_hook(linear("embedding.weight"))
    return found


def train(model: Tied, mode: str) -> None:
    with weight_gradient_scope(min_elements=0 if mode == "deferred" else WORTH_ADDING_IN_PLACE):
        for microbatch in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(microbatch)
            ids_BS = torch.randint(0, V, (2, 64), generator=generator)
            logits = recompute(model, ids_BS) if mode == "recomputed" else model(ids_BS)
            loss = logits.float().square().mean()
            if mode == "deferred":
                with deferring() as deferred:
                    loss.backward()
                deferred.accumulate()
            else:
                loss.backward()


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


needs_grad_dtype = pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="a gradient has its parameter's dtype")


@needs_grad_dtype
@pytest.mark.parametrize("mode", ["whole", "deferred", "recomputed"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_bf16_gradients_equal_the_sum_of_their_products(mode: str, reduce_dtype: torch.dtype | None) -> None:
    model = Tied(Mesh.single())
    buckets = GradientBuckets([model], Mesh.single(), reduce_dtype=reduce_dtype)
    expected = reference(model)
    train(model, mode)
    buckets.finish()
    for name, gradient in buckets.named_gradients():
        assert error(gradient, expected[name]) < 1e-6, f"{name}: bf16 has a spacing of 8e-3"


def errors_over_tensor_ranks(mode: str) -> dict[str, float]:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    model = Tied(mesh)
    buckets = GradientBuckets([model], mesh)
    expected = reference(model)
    train(model, mode)
    return {name: error(x, expected[name]) for name, x in buckets.named_gradients() if name != "embedding.weight"}


@needs_grad_dtype
@pytest.mark.parametrize("mode", ["whole", "deferred"])
def test_tensor_parallel_products_are_not_rounded(mode: str) -> None:
    for errors in run_ranks(errors_over_tensor_ranks, 2, mode):
        assert len(errors) == 4 and max(errors.values()) < 1e-6
