"""The conjugate pairs: forward, backward, traffic and second derivatives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megastack.comm.autograd import copy_to, gather_from, gather_replicated, reduce_from, scatter_to, slice_to
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    f.__name__: f for f in (copy_to, reduce_from, gather_from, scatter_to, slice_to, gather_replicated)
}
WITH_DIM = ("gather_from", "scatter_to", "slice_to", "gather_replicated")


def apply(name: str, x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    extra = (dim,) if name in WITH_DIM else ()
    return FUNCTIONS[name](x, mesh[Axis.TP], *extra)


def values(rank: int, seed: int) -> Tensor:
    return torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank))


def both_ways(name: str, tp: int, dim: int) -> tuple[Tensor, Tensor, dict[tuple[str, str], int]]:
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    x = values(mesh.rank, 0).requires_grad_()
    before = x.detach().clone()
    y = apply(name, x, mesh, dim)
    full = values(mesh.rank, 1).repeat(tp, tp)
    y.backward(full[: y.shape[0], : y.shape[1]])
    assert torch.equal(x, before), "the input was changed"
    return y.detach(), x.grad, {key: traffic.wire_bytes for key, traffic in mesh.ledger.records().items()}


def identity(xs: list[Tensor], dim: int) -> list[Tensor]:
    return xs


def summed(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.stack(xs).sum(0)] * len(xs)


def joined(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [torch.cat(xs, dim)] * len(xs)


def scattered(xs: list[Tensor], dim: int) -> list[Tensor]:
    return list(torch.stack(xs).sum(0).chunk(len(xs), dim))


def sliced(xs: list[Tensor], dim: int) -> list[Tensor]:
    return [x.chunk(len(xs), dim)[rank] for rank, x in enumerate(xs)]


PAIRS = {
    "copy_to": (identity, summed),
    "reduce_from": (summed, identity),
    "gather_from": (joined, scattered),
    "scatter_to": (scattered, joined),
    "slice_to": (sliced, joined),
    "gather_replicated": (joined, sliced),
}


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_backward_of_each_is_its_conjugate(name: str, dim: int, tp: int) -> None:
    results = run_ranks(both_ways, tp, name, tp, dim)
    forward, backward = PAIRS[name]
    expected = forward([values(rank, 0) for rank in range(tp)], dim)
    given = [values(rank, 1).repeat(tp, tp)[: y.shape[0], : y.shape[1]] for rank, y in enumerate(expected)]
    gradients = backward(given, dim)
    for rank, (y, gradient, _) in enumerate(results):
        torch.testing.assert_close(y, expected[rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, gradients[rank], rtol=0, atol=1e-12)


def test_traffic_equals_the_table() -> None:
    tp, small, large = 2, 36 * 8, 2 * 36 * 8  # bytes of the local tensor, and of the gathered one
    expected = {
        "copy_to": {("tp", "all_reduce"): small},
        "reduce_from": {("tp", "all_reduce"): small},
        "gather_from": {("tp", "all_gather"): large // 2, ("tp", "reduce_scatter"): large // 2},
        "scatter_to": {("tp", "reduce_scatter"): small // 2, ("tp", "all_gather"): small // 2},
        "slice_to": {("tp", "all_gather"): small // 2},
        "gather_replicated": {("tp", "all_gather"): large // 2},
    }
    for name, sent in expected.items():
        assert [bytes_sent for _, _, bytes_sent in run_ranks(both_ways, tp, name, tp, 0)] == [sent] * tp


def second_derivative(name: str, tp: int) -> tuple[Tensor, Tensor]:
    """The gradient of Σ f(x)² is linear in x, so its derivative along p is the gradient at p."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    x, p = (values(mesh.rank, seed).requires_grad_() for seed in (0, 1))

    def gradient(at: Tensor) -> Tensor:
        return torch.autograd.grad(apply(name, at, mesh, 0).square().sum(), at, create_graph=True)[0]

    (along,) = torch.autograd.grad((gradient(x) * p.detach()).sum(), x)
    return along, gradient(p).detach()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives_pass_through_the_pair_again(name: str) -> None:
    for along, expected in run_ranks(second_derivative, 2, name, 2):
        torch.testing.assert_close(along, expected, rtol=0, atol=1e-12)


def test_one_rank_adds_nothing_to_the_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    for name in FUNCTIONS:
        assert apply(name, x, Mesh.single(), 0) is x
