"""The operators of compiled products, called without a compiler: gradients, accumulation, deferral and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastack.errors import ConfigError
from megastack.layers.compiled_ops import bind_parameters, compiled_column_product, compiled_row_product
from megastack.layers.linear_ops import column_product, row_product
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.torch_private import keep_operands
from megastack.weight_gradients import deferring, weight_gradient_scope

GROUP = Mesh.single()[Axis.TP]
EAGER, COMPILED = (column_product, row_product), (compiled_column_product, compiled_row_product)
SHAPES = {"up": (2, 6, 4), "up_bias": (2, 6), "other": (5, 4), "down": (3, 12), "down_bias": (3,)}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def loss(products: tuple[Callable[..., Any], Callable[..., Any]], x: Tensor, named: dict[str, Any]) -> Tensor:
    """Two products of one input, one of which is the input of another."""
    column, row = products
    up, other = column(x, [named["up"], named["other"]], [named["up_bias"], None], GROUP)
    down = row(up.flatten(-2), named["down"], named["down_bias"], GROUP)
    return down.square().sum() + other.square().sum()


def inputs(*, needs_grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return values.to(dtype).requires_grad_(needs_grad)


def gradients(products: Any, *, needs_grad: bool, change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Any]:
    own, x = parameters(), inputs(needs_grad=needs_grad)
    bind_parameters(own.values())
    for _ in range(2):  # the second accumulates
        loss(products, x, change(own)).backward()
    return [x.grad, *(parameter.grad for parameter in own.values())]


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "parameters": lambda own: own,
    "computed weights": lambda own: {**own, "up": own["up"] * 2, "down_bias": own["down_bias"].exp()},
    "frozen": lambda own: {**own, "down": own["down"].detach(), "up_bias": own["up_bias"].detach()},
    "cast": lambda own: {name: parameter.float().double() for name, parameter in own.items()},
}


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_those_of_the_eager_products(change: str, needs_grad: bool) -> None:
    found, expected = (gradients(each, needs_grad=needs_grad, change=CHANGES[change]) for each in (COMPILED, EAGER))
    for own, reference in zip(found, expected, strict=True):
        assert (own is None) == (reference is None)
        if own is not None:
            torch.testing.assert_close(own, reference, rtol=1e-12, atol=1e-12)


def test_weight_gradients_are_deferred_and_others_are_not() -> None:
    own, x = parameters(), inputs()
    for parameter in own.values():
        parameter.grad = torch.zeros_like(parameter)
    with weight_gradient_scope():
        bind_parameters(own.values())
        objective = loss(COMPILED, x, own)
        with deferring() as deferred:
            objective.backward()
        assert deferred.parameters == {own["up"], own["other"], own["down"]}
        assert {name for name, parameter in own.items() if gradient(parameter).count_nonzero()} == {
            "up_bias",
            "down_bias",
        }
        deferred.accumulate()
    expected = gradients(EAGER, needs_grad=True, change=CHANGES["parameters"])
    for parameter, twice in zip(own.values(), expected[1:], strict=True):
        torch.testing.assert_close(2 * gradient(parameter), twice, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_compiled_code_does_not_overwrite_deferred_operands() -> None:
    """Inductor would otherwise write later results over the operands of earlier products."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(64, 64, generator=generator) / 8) for _ in range(3)]
    x = torch.randn(32, 64, generator=generator)

    def layers(x: Tensor) -> Tensor:
        for weight in weights:
            (y,) = column_product(torch.tanh(x), [weight], [None], GROUP)
            x = torch.sigmoid(y) * x
        return x

    def deferred_gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        with weight_gradient_scope():
            bind_parameters(weights)
            objective = run(x.clone().requires_grad_()).square().sum()
            with deferring() as deferred:
                objective.backward()
            deferred.accumulate()
        return [gradient(weight) for weight in weights]

    keep_operands()
    found, expected = deferred_gradients(torch.compile(layers, fullgraph=True)), deferred_gradients(layers)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_products_of_bf16_operands_accumulate_in_fp32_without_rounding() -> None:
    own, x = parameters(torch.bfloat16), inputs(dtype=torch.bfloat16)
    for parameter in own.values():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    bind_parameters(own.values())
    (out,) = compiled_column_product(x, [own["other"]], [None], GROUP)
    out.sum().backward()
    exact = x.detach().float().sum((0, 1)).expand(5, 4)
    torch.testing.assert_close(own["other"].grad, exact, rtol=1e-6, atol=1e-6)
    assert not torch.equal(exact, exact.bfloat16().float())


def test_accumulation_hooks_run_once_for_each_backward() -> None:
    own, x, calls = parameters(), inputs(), list[Tensor]()
    own["down"].register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
    bind_parameters(own.values())
    loss(COMPILED, x, own).backward()
    assert len(calls) == 1
    assert torch.equal(calls[0], gradient(own["down"]))


def test_hooks_on_a_gradient_are_an_error() -> None:
    own = parameters()
    own["down"].register_hook(lambda gradient: gradient)
    with pytest.raises(ConfigError, match=r"shape \(3, 12\) has a hook on its gradient.*compile=false"):
        bind_parameters(own.values())


def test_gradients_of_the_input_alone() -> None:
    own, x = parameters(), inputs()
    bind_parameters(own.values())
    (found,) = torch.autograd.grad(loss(COMPILED, x, own), [x])
    (expected,) = torch.autograd.grad(loss(EAGER, x, own), [x])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in own.values())


def test_gradients_of_parameters_are_only_accumulated() -> None:
    own, x = parameters(), inputs()
    bind_parameters(own.values())
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss(COMPILED, x, own), [own["down"]])
