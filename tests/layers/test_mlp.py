"""The MLP alone: its two activations written out, subclasses, shards."""

from __future__ import annotations

import math

import pytest
import torch

from megastack.errors import ConfigError
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.placement.placement import Normal
from megastack.testing.ranks import run_ranks

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


class SquaredReLU(ParallelMLP):
    def activate(self, up):
        return torch.relu(up) ** 2


def test_a_subclass_changes_the_activation():
    layer, x_BSD = SquaredReLU(6, 10, Mesh.single(), activation="gelu", init=STRONG), hidden()
    torch.testing.assert_close(layer(x_BSD), torch.relu(x_BSD @ layer.up.weight.T) ** 2 @ layer.down.weight.T)


def test_initial_values_of_the_two_projections_may_differ():
    layer = ParallelMLP(6, 10, Mesh.single(), init=Normal(0.1), out_init=Normal(0.01))
    assert (layer.up.init, layer.down.init) == (Normal(0.1), Normal(0.01))


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
