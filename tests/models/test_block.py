"""Blocks on their own, users' blocks, and values that blocks hand on beside the hidden states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastack.errors import ConfigError
from megastack.layers.context import Context
from megastack.mesh.mesh import Mesh
from megastack.models.block import Block
from megastack.placement.module import ParallelModule
from tests.models.model_cases import LLAMA, build, microbatch, tiny


class ParallelBlock(Block):
    """Attention and MLP side by side, with a factor given in the configuration."""

    def __init__(self, *args, scale=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = scale

    def forward(self, hidden_BSD, context=None):
        normed_BSD = self.attention_norm(hidden_BSD)
        return hidden_BSD + self.scale * (self.attention(normed_BSD, context) + self.mlp(normed_BSD, context))


class PassingBlock(Block):
    """Passes on an integer mask and a value that may be None."""

    def boundary(self) -> tuple[str, ...]:
        return ("seen_BS", "gain_BSD")

    def forward(self, hidden_BSD, context=None, seen_BS=None, gain_BSD=None):
        seen_BS = torch.zeros_like(context.positions_BS) if seen_BS is None else seen_BS + 1
        hidden_BSD = super().forward(hidden_BSD, context)
        if gain_BSD is not None:
            hidden_BSD = hidden_BSD * gain_BSD
        return hidden_BSD, seen_BS, torch.sigmoid(hidden_BSD) if self.layer == 1 else None


class ForgetfulBlock(PassingBlock):
    def forward(self, hidden_BSD, context=None, seen_BS=None, gain_BSD=None):
        return super().forward(hidden_BSD, context, seen_BS, gain_BSD)[:2]


def block(name: str, **options) -> dict[str, object]:
    return {"_target_": f"{__name__}.{name}", **options}


def test_a_block_of_ones_own_is_built_with_its_parents_arguments_and_its_own_keys():
    decoder = build(tiny(LLAMA | {"block": block("ParallelBlock", scale=0.5)}), Mesh.single())
    assert [type(b) for b in decoder.blocks.values()] == [ParallelBlock, ParallelBlock]
    assert [(b.layer, b.scale) for b in decoder.blocks.values()] == [(0, 0.5), (1, 0.5)]
    decoder({}, microbatch()).objective.backward()
    assert decoder.blocks["0"].mlp_norm.weight.grad is None


def test_extra_values_cross_blocks_and_stages():
    config = tiny(LLAMA | {"layers": 4, "block": block("PassingBlock")})
    whole, batch = build(config, Mesh.single()), microbatch()
    expected = whole({}, batch)
    expected.objective.backward()
    first = build(config, Mesh.single(), layers=range(2))
    last = build(config, Mesh.single(), layers=range(2, 4))
    outputs = first({}, batch)
    assert set(outputs) == {"hidden", "seen_BS", "gain_BSD"}
    assert outputs["seen_BS"].dtype == torch.int64 and (outputs["seen_BS"] == 1).all()
    assert outputs["gain_BSD"].requires_grad
    loss = last(outputs, batch)
    torch.testing.assert_close(loss.report, expected.report, rtol=1e-12, atol=0)
    loss.objective.backward()
    for stage in (first, last):
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
    assert build(config, Mesh.single(), layers=range(1))({}, batch)["gain_BSD"] is None


def every_other(*args, layer: int, **kwargs) -> Block:
    """Passes values in even blocks only."""
    return (Block if layer % 2 else PassingBlock)(*args, layer=layer, **kwargs)


def test_values_pass_by_a_block_that_does_not_name_them():
    config = tiny(LLAMA | {"layers": 4, "block": block("every_other")})
    outputs = build(config, Mesh.single(), layers=range(4), head=False)({}, microbatch())
    assert (outputs["seen_BS"] == 1).all() and outputs["gain_BSD"] is None


def test_a_block_that_returns_less_than_it_names_is_rejected():
    decoder = build(tiny(LLAMA | {"block": block("ForgetfulBlock")}), Mesh.single())
    with pytest.raises(ConfigError, match=r"ForgetfulBlock: .*must return \(hidden, seen_BS, gain_BSD\)"):
        decoder({}, microbatch())


class Times(ParallelModule):
    def __init__(self, factor: float) -> None:
        super().__init__(Mesh.single())
        self.factor = factor

    def forward(self, hidden_BSD: Tensor, context=None) -> Tensor:
        return self.factor * hidden_BSD


def simple(attention: float, mlp: float, **options) -> Block:
    layers = {"attention": lambda: Times(attention), "mlp": lambda: Times(mlp), "norm": nn.Identity}
    return Block(16, Mesh.single(), **layers, **options)


def test_a_block_adds_its_layers_to_the_residual_stream():
    x_BSD = torch.randn(2, 3, 16)
    made = simple(2, 3, layer=0)
    torch.testing.assert_close(made(x_BSD), 12 * x_BSD)
    hidden, value = made(x_BSD, None, "kept")
    assert value == "kept" and torch.equal(hidden, made(x_BSD))


def test_every_layer_of_every_block_drops_differently():
    context = Context(samples_B=torch.tensor([0, 1]))
    x_BSD = torch.ones(2, 8, 16)
    masks = [
        simple(attention, 1 - attention, layer=layer, dropout=0.5)(x_BSD, context)
        for layer in (0, 1)
        for attention in (0, 1)
    ]
    for i, mask in enumerate(masks):
        assert set(mask.unique().tolist()) == {1.0, 3.0}
        assert not any(torch.equal(mask, other) for other in masks[:i])


def test_a_recomputed_block_drops_what_it_dropped():
    config = tiny(LLAMA | {"dropout": 0.5, "attention_dropout": 0.5})
    made = build(config, Mesh.single(), layers=range(1), head=False).blocks["0"]
    context = Context.of(microbatch().positions_BS, None, microbatch().samples_B)
    x_BSD = torch.randn(2, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for run in (made, lambda *args: checkpoint(made, *args, use_reentrant=False, preserve_rng_state=False)):
        made.zero_grad()
        out_BSD = run(x_BSD, context)
        out_BSD.square().sum().backward()
        results.append([out_BSD.detach(), *(parameter.grad for parameter in made.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
