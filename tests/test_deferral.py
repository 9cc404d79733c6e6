"""Weight gradients that are put off: what a backward leaves out, what W makes of it, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megastack.layers.linear_ops import column_product, row_product
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.models.recompute import recompute
from megastack.testing.ranks import run_ranks
from tests.layers.layer_parity import randn, randomised, split_like

B, S, D, F = 2, 4, 6, 8
Function = Callable[[Tensor], Tensor]


def gradients(mesh: Mesh, function: Function, x: Tensor, tensors: list[Tensor], split: bool) -> list[Tensor | None]:
    """Of the input and of other leaves, from one backward or from its two parts."""
    leaf = x.clone().requires_grad_()
    for tensor in tensors:
        tensor.grad = None
    if not split:
        function(leaf).square().sum().backward()
        return [leaf.grad, *(t.grad for t in tensors)]
    with mesh.deferral.on():
        out = function(leaf).square().sum()
        with mesh.deferral.collecting() as put_off:
            out.backward()
        first, before = leaf.grad, [t.grad is None for t in tensors]
        awaited = put_off.parameters
        assert before == [t in awaited or not t.requires_grad for t in tensors], "put off is what has no gradient yet"
        put_off.run()
    return [first, *(t.grad for t in tensors)]


def assert_equal_in_parts(mesh: Mesh, function: Function, tensors: list[Tensor], x: Tensor) -> None:
    whole = gradients(mesh, function, x, tensors, split=False)
    parts = gradients(mesh, function, x, tensors, split=True)
    for expected, found in zip(whole, parts, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def parameter(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(randn(*shape, seed=sum(shape)).to(dtype))


def test_parameters_views_casts_and_shared_weights() -> None:
    mesh = Mesh.single()
    group = mesh[Axis.TP]
    plain, viewed, cast = parameter(D, D), parameter(2, 3, D), parameter(D, D, dtype=torch.float32)
    bias, norm = parameter(D), parameter(D)

    def function(x: Tensor) -> Tensor:
        h, g = column_product(x * norm, [plain, viewed.flatten(0, -2)], [bias, None], group)
        return row_product(torch.tanh(h + g), cast, None, group) + row_product(h, plain, None, group)

    assert_equal_in_parts(mesh, function, [plain, viewed, cast, bias, norm], randn(B, S, D))
    with mesh.deferral.on():
        out = function(randn(B, S, D)).sum()
        with mesh.deferral.collecting() as put_off:
            out.backward()
    assert put_off.parameters == {plain, viewed, cast}


def test_weights_that_are_computed_or_frozen_are_not_put_off() -> None:
    mesh = Mesh.single()
    group = mesh[Axis.TP]
    direction, scale, frozen = parameter(D, D), parameter(D, 1), parameter(D, D).requires_grad_(False)

    def function(x: Tensor) -> Tensor:
        weight = direction / direction.norm(dim=1, keepdim=True) * scale
        return row_product(torch.tanh(row_product(x, weight, None, group)), frozen, None, group)

    assert_equal_in_parts(mesh, function, [direction, scale, frozen], randn(B, S, D))


def test_an_input_without_gradient() -> None:
    mesh = Mesh.single()
    weight = parameter(D, D)
    with mesh.deferral.on():
        out = row_product(randn(B, S, D), weight, None, mesh[Axis.TP]).square().sum()
        with mesh.deferral.collecting() as put_off:
            out.backward()
        assert weight.grad is None
        put_off.run()
    reference = (randn(B, S, D) @ weight.T).square().sum()
    torch.testing.assert_close(weight.grad, torch.autograd.grad(reference, weight)[0])


def test_each_parameter_is_stored_once() -> None:
    """Hooks that count stored gradients must not see a weight that is used twice half done."""
    mesh = Mesh.single()
    weight, stored = parameter(D, D), []
    group = mesh[Axis.TP]

    def note(tensor: Tensor) -> None:
        if tensor.grad is not None:
            stored.append(tensor.grad.clone())

    weight.register_post_accumulate_grad_hook(note)
    with mesh.deferral.on():
        out = row_product(row_product(randn(B, S, D), weight, None, group), weight, None, group).sum()
        with mesh.deferral.collecting() as put_off:
            out.backward()
        assert not stored
        put_off.run()
    assert len(stored) == 1
    torch.testing.assert_close(stored[0], weight.grad)


def test_a_backward_that_does_not_collect_is_whole() -> None:
    """A schedule may split some backwards and not others."""
    mesh = Mesh.single()
    weight = parameter(D, D)
    with mesh.deferral.on():
        row_product(randn(B, S, D), weight, None, mesh[Axis.TP]).square().sum().backward()
    whole = weight.grad
    weight.grad = None
    row_product(randn(B, S, D), weight, None, mesh[Axis.TP]).square().sum().backward()
    torch.testing.assert_close(whole, weight.grad)


def test_nothing_is_put_off_unless_it_is_asked_for() -> None:
    mesh = Mesh.single()
    out = row_product(randn(B, S, D), parameter(D, D), None, mesh[Axis.TP])
    with mesh.deferral.collecting() as put_off:
        out.sum().backward()
    assert not put_off.parameters


def test_with_recompute_what_is_computed_again_is_put_off() -> None:
    mesh = Mesh.single()
    mlp = randomised(ParallelMLP(D, F, mesh, activation="gelu", bias=True))
    again: Function = lambda x: recompute(mlp.forward, x, None)  # noqa: E731
    assert_equal_in_parts(mesh, again, list(mlp.parameters()), randn(B, S, D))


def split_backward(tp: int, sequence_parallel: bool) -> dict[str, int]:
    """An MLP on tp ranks, both ways; the collectives of the whole backward, of I and of W."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    whole = randomised(ParallelMLP(D, F, Mesh.single(), activation="gelu", bias=True))
    options = {"activation": "gelu", "bias": True, "sequence_parallel": sequence_parallel}
    mlp = split_like(ParallelMLP(D, F, mesh, **options), whole)
    x = randn(B, S // tp if sequence_parallel else S, D, seed=mesh.rank if sequence_parallel else 0)
    assert_equal_in_parts(mesh, mlp, list(mlp.parameters()), x)
    counts = {}

    def count(name: str) -> None:
        counts[name] = mesh.ledger.total("tp").calls
        mesh.ledger.reset()

    out = mlp(x.clone().requires_grad_()).sum()
    mesh.ledger.reset()
    out.backward()
    count("whole")
    with mesh.deferral.on():
        out = mlp(x.clone().requires_grad_()).sum()
        mesh.ledger.reset()
        with mesh.deferral.collecting() as put_off:
            out.backward()
        count("I")
        put_off.run()
        count("W")
    return counts


@pytest.mark.parametrize(("sequence_parallel", "later"), [(False, 0), (True, 1)])
def test_tensor_parallel_layers_gather_their_input_with_the_weights(sequence_parallel: bool, later: int) -> None:
    for counts in run_ranks(split_backward, 2, 2, sequence_parallel):
        assert counts["W"] == later, "the second gather of the input goes with W"
        assert counts["I"] + counts["W"] == counts["whole"]
