"""Weight gradients accumulated in place or deferred: equal to plain autograd's, without extra tensors."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megastack.layers.embedding import VocabParallelEmbedding
from megastack.layers.linear_ops import column_product, row_product
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.models.recompute import recompute
from megastack.testing.ranks import run_ranks
from megastack.weight_gradients import (
    AccumulationHook,
    current_scope,
    deferring,
    entered,
    target_of,
    weight_gradient_scope,
)
from tests.layers.layer_parity import randn, randomised, split_like

B, S, D, F = 2, 4, 6, 8
Function = Callable[[Tensor], Tensor]


def gradients(
    mesh: Mesh, function: Function, x: Tensor, tensors: list[Tensor], *, split: bool, held: bool
) -> list[Tensor | None]:
    """Gradients of the input and of other leaves, from a whole or a split backward, on top of what ``.grad`` held."""
    leaf = x.clone().requires_grad_()
    for tensor in tensors:
        tensor.grad = torch.full_like(tensor, 0.5) if held and tensor.requires_grad else None
    begun = [None if t.grad is None else t.grad.clone() for t in tensors]
    places = [None if t.grad is None else t.grad.data_ptr() for t in tensors]
    with weight_gradient_scope():
        out = function(leaf).square().sum()
        if split:
            with deferring() as deferred:
                out.backward()
            pairs = zip(tensors, begun, strict=True)
            untouched = [t.grad is b or (b is not None and torch.equal(t.grad, b)) for t, b in pairs]
            pending = deferred.parameters
            assert untouched == [t in pending or not t.requires_grad for t in tensors], (
                "only deferred gradients are pending"
            )
            deferred.accumulate()
        else:
            out.backward()
    if held:
        assert places == [None if t.grad is None else t.grad.data_ptr() for t in tensors], "the buffers stay"
    return [leaf.grad, *(t.grad for t in tensors)]


def assert_equal_every_way(mesh: Mesh, function: Function, tensors: list[Tensor], x: Tensor) -> None:
    """Accumulated in place or by autograd, at once or deferred: equal to plain autograd."""
    leaf = x.clone().requires_grad_()
    sources = [leaf, *tensors]
    asked = [tensor for tensor in sources if tensor.requires_grad]
    found = iter(torch.autograd.grad(function(leaf).square().sum(), asked))
    plain = [next(found) if tensor.requires_grad else None for tensor in sources]
    for split, held in itertools.product((False, True), repeat=2):
        got = gradients(mesh, function, x, tensors, split=split, held=held)
        for place, (expected, actual) in enumerate(zip(plain, got, strict=True)):
            assert (expected is None) == (actual is None)
            if expected is not None and actual is not None:
                rtol = 1e-12 if actual.dtype == torch.float64 else 1e-6
                torch.testing.assert_close(actual, expected + 0.5 * (held and place > 0), rtol=rtol, atol=rtol)


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

    assert_equal_every_way(mesh, function, [plain, viewed, cast, bias, norm], randn(B, S, D))
    with weight_gradient_scope():
        out = function(randn(B, S, D)).sum()
        with deferring() as deferred:
            out.backward()
    assert deferred.parameters == {plain, viewed, cast}


class Operations(TorchDispatchMode):
    """Records the shapes of the tensors that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        in_place = func.name().split("::")[1].split(".")[0].endswith("_")
        if isinstance(out, Tensor) and not func.is_view and not in_place:
            self.made.add(tuple(out.shape))
        return out


@pytest.mark.parametrize("split", [False, True])
def test_accumulation_in_place_creates_no_gradient_tensor(split: bool) -> None:
    mesh = Mesh.single()
    weight, table = parameter(5, D), parameter(9, D)
    ids_BS = torch.tensor([[1, 3, 3, 8], [0, 1, 1, 1]])
    embedding = VocabParallelEmbedding(9, D, mesh, vocab_multiple=1, weight=table)
    weight.grad, table.grad = torch.zeros_like(weight), torch.zeros_like(table)
    with weight_gradient_scope():
        out = row_product(embedding(ids_BS), weight, None, mesh[Axis.TP]).square().sum()
        with Operations() as operations:
            if split:
                with deferring() as deferred:
                    out.backward()
                deferred.accumulate()
            else:
                out.backward()
    assert operations.made and not {(5, D), (9, D)} & operations.made
    assert weight.grad.any() and table.grad.any()


def backward_in_parts(mesh: Mesh, out: Tensor) -> None:
    with deferring() as deferred:
        out.backward()
    deferred.accumulate()


@pytest.mark.parametrize("on_a_view", [False, True])
def test_a_hook_on_a_gradient_sees_it_once_and_changes_it(on_a_view: bool) -> None:
    mesh = Mesh.single()
    parameter_, seen = parameter(D, D), []
    parameter_.grad = torch.zeros_like(parameter_)

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 2

    if not on_a_view:
        parameter_.register_hook(double)
    x = randn(B, S, D)

    def out() -> Tensor:
        weight = parameter_.view(D, D) if on_a_view else parameter_
        if on_a_view:
            weight.register_hook(double)
        return row_product(x, weight, None, mesh[Axis.TP]).sum()

    with weight_gradient_scope():
        out().backward()
        backward_in_parts(mesh, out())
    assert len(seen) == 2
    torch.testing.assert_close(parameter_.grad, 4 * x.sum((0, 1)).expand(D, D))


def test_an_accumulation_hook_runs_once_per_backward() -> None:
    mesh = Mesh.single()
    weight, calls = parameter(D, D), []
    weight.grad = torch.zeros_like(weight)
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    x = randn(B, S, D)
    with weight_gradient_scope():
        row_product(x, weight, None, mesh[Axis.TP]).sum().backward()
        backward_in_parts(mesh, row_product(x, weight, None, mesh[Axis.TP]).sum())
    assert len(calls) == 2
    torch.testing.assert_close(calls[1], 2 * calls[0])


@pytest.mark.parametrize("split", [False, True])
def test_gradients_taken_inside_a_layer_are_not_accumulated(split: bool) -> None:
    """With respect to its input or its weight, in its forward."""
    mesh = Mesh.single()
    weight, table, x = parameter(D, D), parameter(D, D), randn(B, S, D)
    ids_BS = torch.tensor([[1, 3, 3, 5], [0, 1, 1, 1]])
    embedding = VocabParallelEmbedding(D, D, mesh, vocab_multiple=1, weight=table)

    def layer(x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            inner = row_product(y + embedding(ids_BS), weight, None, mesh[Axis.TP]).square().sum()
            found = torch.autograd.grad(inner, (y, weight, table), retain_graph=True)
            (slope,) = torch.autograd.grad(inner, y, create_graph=True)
            (twice,) = torch.autograd.grad(slope.sum(), weight)
        own = sum(part.sum() for part in (*found, twice))
        return row_product(x, weight, None, mesh[Axis.TP]) * (1 + 1e-3 * own)

    results = []
    for on in (False, True):
        weight.grad, table.grad, leaf = torch.zeros_like(weight), torch.zeros_like(table), x.clone().requires_grad_()
        with weight_gradient_scope() if on else contextlib.nullcontext():
            out = layer(leaf).square().sum()
            if split and on:
                backward_in_parts(mesh, out)
            else:
                out.backward()
        results.append((weight.grad, table.grad, leaf.grad))
    assert results[0][0].any()
    for plain, found in zip(*results, strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_weights_that_are_computed_or_frozen_are_not_deferred() -> None:
    mesh = Mesh.single()
    group = mesh[Axis.TP]
    direction, scale, frozen = parameter(D, D), parameter(D, 1), parameter(D, D).requires_grad_(False)

    def function(x: Tensor) -> Tensor:
        weight = direction / direction.norm(dim=1, keepdim=True) * scale
        return row_product(torch.tanh(row_product(x, weight, None, group)), frozen, None, group)

    assert_equal_every_way(mesh, function, [direction, scale, frozen], randn(B, S, D))


def test_weights_of_several_dims_of_which_one_is_small() -> None:
    """The gradient of a small weight is accumulated by autograd, the other one in place."""
    mesh = Mesh.single()
    large, small, bias = parameter(2, 3, D), parameter(3, D), parameter(2, 3)
    x = randn(B, S, D)

    def out() -> Tensor:
        first, second = column_product(x, [large, small], [bias, None], mesh[Axis.TP])
        assert first.shape == (B, S, 2, 3)
        return (first.sum(-2) * second).sum()

    expected = torch.autograd.grad(out(), [large, small, bias])
    large.grad, small.grad, bias.grad = torch.zeros_like(large), torch.zeros_like(small), torch.zeros_like(bias)
    with weight_gradient_scope(min_elements=large.numel()), Operations() as operations:
        out().backward()
    assert (6, D) not in operations.made and (3, D) in operations.made
    for tensor, gradient in zip((large, small, bias), expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_products_may_be_changed_in_place() -> None:
    weight, x = parameter(2, 3, D), randn(B, S, D)
    expected = torch.autograd.grad((x @ weight.flatten(0, 1).T).mul(3).square().sum(), weight)[0]
    with weight_gradient_scope():
        (out,) = column_product(x, [weight], [None], Mesh.single()[Axis.TP])
        out.mul_(3).square().sum().backward()
    torch.testing.assert_close(weight.grad, expected)


class _Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("split", [False, True])
def test_a_product_whose_gradient_stops_behind_it(split: bool) -> None:
    mesh, weight, x = Mesh.single(), parameter(D, D), randn(B, S, D).requires_grad_()
    with weight_gradient_scope():
        out = _Stop.apply(row_product(x * 1, weight, None, mesh[Axis.TP])).sum() + x.sum()
        backward_in_parts(mesh, out) if split else out.backward()
    assert x.grad is not None and x.grad.eq(1).all()
    assert weight.grad is None or not weight.grad.any()


def test_an_input_without_gradient() -> None:
    mesh = Mesh.single()
    weight = parameter(D, D)
    with weight_gradient_scope():
        out = row_product(randn(B, S, D), weight, None, mesh[Axis.TP]).square().sum()
        with deferring() as deferred:
            out.backward()
        assert weight.grad is None
        deferred.accumulate()
    reference = (randn(B, S, D) @ weight.T).square().sum()
    torch.testing.assert_close(weight.grad, torch.autograd.grad(reference, weight)[0])


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_each_parameter_is_accumulated_once(split: bool, held: bool) -> None:
    """Hooks that count gradients must not see an incomplete one of a weight that is used twice."""
    mesh = Mesh.single()
    weight, stored = parameter(D, D), []
    group = mesh[Axis.TP]
    weight.grad = torch.zeros_like(weight) if held else None

    def record(tensor: Tensor) -> None:
        if tensor.grad is not None and tensor.grad.any():
            stored.append(tensor.grad.clone())

    class Recorded(AccumulationHook):
        def __call__(self, tensor: Tensor) -> None:
            record(tensor)

    weight.register_post_accumulate_grad_hook(Recorded())
    with weight_gradient_scope():
        out = row_product(row_product(randn(B, S, D), weight, None, group), weight, None, group).sum()
        if split:
            with deferring() as deferred:
                out.backward()
            assert not stored
            deferred.accumulate()
        else:
            out.backward()
    assert len(stored) == 1
    torch.testing.assert_close(stored[0], weight.grad)


def test_a_backward_that_does_not_defer_is_whole() -> None:
    """A schedule may split some backwards and not others."""
    mesh = Mesh.single()
    weight = parameter(D, D)
    with weight_gradient_scope():
        row_product(randn(B, S, D), weight, None, mesh[Axis.TP]).square().sum().backward()
    whole = weight.grad
    weight.grad = None
    row_product(randn(B, S, D), weight, None, mesh[Axis.TP]).square().sum().backward()
    torch.testing.assert_close(whole, weight.grad)


def test_nothing_is_deferred_outside_of_a_scope() -> None:
    mesh = Mesh.single()
    out = row_product(randn(B, S, D), parameter(D, D), None, mesh[Axis.TP])
    with deferring() as deferred:
        out.sum().backward()
    assert not deferred.parameters


def test_gradients_of_recomputed_layers_are_deferred() -> None:
    mesh = Mesh.single()
    mlp = randomised(ParallelMLP(D, F, mesh, activation="gelu", bias=True))
    again: Function = lambda x: recompute(mlp.forward, x, None)  # noqa: E731
    assert_equal_every_way(mesh, again, list(mlp.parameters()), randn(B, S, D))


def test_an_embedding() -> None:
    mesh = Mesh.single()
    embedding = randomised(VocabParallelEmbedding(16, D, mesh, vocab_multiple=1))
    ids_BS = torch.tensor([[1, 3, 3, 15], [0, 1, 1, 1]])
    assert_equal_every_way(mesh, lambda x: x + embedding(ids_BS), [embedding.weight], randn(B, S, D))
    with weight_gradient_scope():
        out = embedding(ids_BS).sum()
        with deferring() as deferred:
            out.backward()
    assert deferred.parameters == {embedding.weight}


def split_backward(tp: int, sequence_parallel: bool) -> dict[str, int]:
    """An MLP on tp ranks, both ways; the collectives of the whole backward, of I and of W."""
    mesh = Mesh.from_environment(MeshShape(tp=tp))
    whole = randomised(ParallelMLP(D, F, Mesh.single(), activation="gelu", bias=True))
    options = {"activation": "gelu", "bias": True, "sequence_parallel": sequence_parallel}
    mlp = split_like(ParallelMLP(D, F, mesh, **options), whole)
    x = randn(B, S // tp if sequence_parallel else S, D, seed=mesh.rank if sequence_parallel else 0)
    assert_equal_every_way(mesh, mlp, list(mlp.parameters()), x)
    counts = {}

    def count(name: str) -> None:
        counts[name] = mesh.ledger.total("tp").calls
        mesh.ledger.reset()

    out = mlp(x.clone().requires_grad_()).sum()
    mesh.ledger.reset()
    out.backward()
    count("whole")
    with weight_gradient_scope():
        out = mlp(x.clone().requires_grad_()).sum()
        mesh.ledger.reset()
        with deferring() as deferred:
            out.backward()
        count("I")
        deferred.accumulate()
        count("W")
    return counts


@pytest.mark.parametrize(("sequence_parallel", "later"), [(False, 0), (True, 1)])
def test_tensor_parallel_layers_gather_their_input_with_the_weights(sequence_parallel: bool, later: int) -> None:
    for counts in run_ranks(split_backward, 2, 2, sequence_parallel):
        assert counts["W"] == later, "the second gather of the input goes with W"
        assert counts["I"] + counts["W"] == counts["whole"]


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_on_another_thread_defers(again: bool) -> None:
    """As autograd's on a GPU: the thread is outside of the scope, and may run recomputed forwards."""
    mesh = Mesh.single()
    mlp = randomised(ParallelMLP(D, F, mesh, activation="gelu"))
    weights, x = list(mlp.parameters()), randn(B, S, D)
    expected = torch.autograd.grad(mlp(x).square().sum(), weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    with weight_gradient_scope():
        out = (recompute(mlp.forward, x, None) if again else mlp(x)).square().sum()
        with deferring() as deferred:
            thread = threading.Thread(target=out.backward)
            thread.start()
            thread.join()
    assert deferred.parameters == set(weights) and not any(weight.grad.any() for weight in weights)
    deferred.accumulate()
    for weight, gradient in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient)


def test_a_parameter_has_one_target_per_scope() -> None:
    weight, other = parameter(D, D), parameter(D, D)
    with weight_gradient_scope() as scope:
        target = target_of(weight)
        assert target is not None and target is target_of(weight) and target is not target_of(other)
        assert target_of(weight.view(D, D)) is not target
        assert target_of(weight.requires_grad_(False)) is None
        assert target_of(weight.requires_grad_()) is target
        with torch.no_grad():
            assert target_of(weight) is None
        with weight_gradient_scope():
            assert target_of(weight) is not target
    assert not scope.targets


def test_scopes_nest_and_end() -> None:
    weight = parameter(D, D)
    assert current_scope() is None and target_of(weight) is None
    with weight_gradient_scope(min_elements=D * D + 1) as outer:
        assert target_of(weight) is None, "a small weight"
        with weight_gradient_scope() as inner, entered(outer):
            assert current_scope() is outer
        assert current_scope() is outer is not inner
    with pytest.raises(ValueError, match="a step that fails"), weight_gradient_scope():
        raise ValueError("a step that fails")
    assert current_scope() is None
