"""The MLP alone: its two activations written out, subclasses, shards."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megastack.errors import ConfigError
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.placement.placement import Normal
from megastack.testing.ranks import run_ranks
from tests.models.test_activations import Live

STRONG = Normal(0.5)


def hidden() -> torch.Tensor:
    return torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))


def test_swiglu_multiplies_by_a_gate_that_comes_first():
    layer, x_BSD = ParallelMLP(6, 10, Mesh.single(), init=STRONG), hidden()
    assert layer.up.weight.shape == (2, 10, 6)
    gate, up = x_BSD @ layer.up.weight[0].T, x_BSD @ layer.up.weight[1].T
    torch.testing.assert_close(layer(x_BSD), (gate * torch.sigmoid(gate) * up) @ layer.down.weight.T)


def test_gelu_is_gpt2s_tanh_approximation():
    layer, x_BSD = ParallelMLP(6, 10, Mesh.single(), activation="gelu", bias=True, init=STRONG), hidden()
    assert layer.up.weight.shape == (10, 6)
    for linear in (layer.up, layer.down):
        linear.bias.detach().normal_(generator=torch.Generator().manual_seed(1))
    up = x_BSD @ layer.up.weight.T + layer.up.bias
    inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    torch.testing.assert_close(layer(x_BSD), inner @ layer.down.weight.T + layer.down.bias)


def activated(x: torch.Tensor, gradient: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's GELU and its gradient."""
    x = x.clone().requires_grad_()
    out = ParallelMLP(6, 10, Mesh.single(), activation="gelu").activate(x)
    out.backward(torch.ones_like(x) if gradient is None else gradient)
    return out.detach(), x.grad


def torchs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    out = F.gelu(x, approximate="tanh")
    out.backward(torch.ones_like(x))
    return out.detach(), x.grad


def steps(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every size, and densely those where the GELU bends."""
    sizes = torch.logspace(-30, 4, 2001, dtype=torch.float64)
    return torch.cat([torch.linspace(-12, 12, 20001, dtype=torch.float64), sizes, -sizes]).to(dtype)


def exact(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GELU and slope in fp64 without a difference of nearly equal numbers."""
    x, rate, cube = x.double(), 2 * math.sqrt(2 / math.pi), 0.044715
    inner = rate * (x + cube * x**3)
    rising, falling = torch.sigmoid(inner), torch.sigmoid(-inner)
    return x * rising, rising * (1 + x * rate * (1 + 3 * cube * x * x) * falling)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_is_as_exact_as_torchs_and_its_slope_half_as_exact(dtype):
    """Both slopes are least exact where the sigmoid is nearly one: 17 and 9 last places of a slope of one in fp32."""
    x, unit = steps(dtype), torch.finfo(dtype).eps
    value, slope = activated(x)
    assert value.dtype == slope.dtype == dtype
    expected, expected_slope = exact(x)
    assert ((value - expected).abs() <= 2 * unit * x.abs()).all()
    above = x > -1  # where the GELU is no small part of x
    torch.testing.assert_close(value[above].double(), expected[above], rtol=3 * unit, atol=0)
    worst, torchs_worst = ((found - expected_slope).abs().max() for found in (slope, torchs(x)[1]))
    assert worst <= 2.2 * torchs_worst <= 50 * unit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gelu_is_torchs(dtype):
    x = steps(torch.float32).to(dtype)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(activated(x), torchs(x), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_of_large_numbers_is_the_number_or_zero(dtype):
    value, slope = activated(torch.tensor([-1e4, -300.0, 300.0, 1e4], dtype=dtype))
    assert torch.equal(value, torch.tensor([0, 0, 300.0, 1e4], dtype=dtype))
    assert slope.tolist() == [0, 0, 1, 1]


def test_gelus_gradient_is_multiplied_by_the_one_of_its_output():
    x, gradient = steps(torch.float64), torch.linspace(-3, 3, 24003, dtype=torch.float64)
    torch.testing.assert_close(activated(x, gradient)[1], gradient * activated(x)[1], rtol=1e-15, atol=0)


def test_gelu_needs_one_tensor_in_backward_beside_its_output_and_gradient():
    x = torch.randn(2, 64, 128, requires_grad=True)
    gradient, unit = torch.randn(2, 64, 128), x.numel() * 4
    layer = ParallelMLP(6, 10, Mesh.single(), activation="gelu")
    with Live(x, gradient) as live:
        out = layer.activate(x)
        assert unit <= live.peak < 1.01 * unit
        out.backward(gradient)
    assert live.peak < 3.01 * unit, "output, gradient and one more"


class SquaredReLU(ParallelMLP):
    def activate(self, up):
        return torch.relu(up) ** 2


def test_a_subclass_changes_the_activation():
    layer, x_BSD = SquaredReLU(6, 10, Mesh.single(), activation="gelu", init=STRONG), hidden()
    torch.testing.assert_close(layer(x_BSD), torch.relu(x_BSD @ layer.up.weight.T) ** 2 @ layer.down.weight.T)


def test_initial_values_of_the_two_projections_may_differ():
    layer = ParallelMLP(6, 10, Mesh.single(), init=Normal(0.1), out_init=Normal(0.01))
    assert (layer.up.spec.init, layer.down.spec.init) == (Normal(0.1), Normal(0.01))


def test_an_unknown_activation_is_refused():
    with pytest.raises(ConfigError, match="activation=relu: unknown; use swiglu or gelu"):
        ParallelMLP(6, 10, Mesh.single(), activation="relu")


def split(activation: str) -> tuple[tuple[int, ...], float]:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    options = {"activation": activation, "bias": True, "init": STRONG}
    layer, single = ParallelMLP(6, 10, mesh, **options), ParallelMLP(6, 10, Mesh.single(), **options)
    return tuple(layer.up.weight.shape), (layer(hidden()) - single(hidden())).abs().max().item()


def test_two_ranks_hold_half_the_features_of_gate_and_up_and_agree_with_one():
    for activation, shape in (("swiglu", (2, 5, 6)), ("gelu", (5, 6))):
        for found, error in run_ranks(split, 2, activation):
            assert found == shape and error < 1e-6
