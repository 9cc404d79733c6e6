"""Recomputing changes neither losses nor gradients by a bit, and sends what its forward sends once more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.config.schema import RecomputeOptions, TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.layers.context import Context
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.models.block import Block
from megastack.models.recompute import recompute
from megastack.testing.ranks import run_ranks
from tests.models.model_cases import GPT2, LLAMA, QWEN, build, microbatch, tiny
from tests.models.test_block import PassingBlock

MLPS = ("pattern", r"blocks\.\d+\.mlp")
MODES: list[tuple[str, str | None]] = [
    ("full", None),
    ("selective", None),
    MLPS,
    ("pattern", r"^blocks\.(0|2)$"),
    ("pattern", r"blocks\.1\.(mlp|attention)"),
]
MODE = type(RecomputeOptions().mode)


def with_recompute(config: TrainConfig, mode: str, pattern: str | None = None) -> TrainConfig:
    return replace(config, recompute=RecomputeOptions(mode=MODE(mode), pattern=pattern))


def target(name: str) -> dict[str, str]:
    return {"_target_": f"{__name__}.{name}"}


def gradients(config: TrainConfig, mesh: Mesh, *, documents: bool = False, freeze: str = "-") -> dict[str, Tensor]:
    decoder = build(config, mesh)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(freeze not in name)
    loss = decoder({}, microbatch(documents=documents))
    loss.objective.backward()
    found = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    return {"<loss>": loss.report, "<generator>": torch.get_rng_state()} | found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different


class SlopedMLP(ParallelMLP):
    """Asks autograd for gradients in its forward: of something of its own, to go on with, and of its products."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        (slope,) = torch.autograd.grad(x.tanh().pow(3).sum(), x, create_graph=True)
        y = super().forward(x + slope, context)
        (size,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
        return y * size.tanh()


DROPS = {"dropout": 0.5, "attention_dropout": 0.5, "layers": 3}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA | {"layers": 3, "dropout": 0.5}, {"documents": True}),
    "gpt2": (GPT2 | DROPS, {"documents": True}),
    "qwen": (QWEN | DROPS, {}),
    "frozen_start": (LLAMA | DROPS, {"freeze": "embedding"}),
    "frozen_mlps": (LLAMA | {"layers": 3}, {"freeze": "mlp"}),
    "extra_values": (LLAMA | DROPS | {"block": {"_target_": f"{PassingBlock.__module__}.PassingBlock"}}, {}),
    "own_gradients": (LLAMA | DROPS | {"attention_dropout": 0.0, "mlp": target("SlopedMLP")}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_stay_bitwise(name):
    model, how = CASES[name]
    expected = gradients(tiny(model), Mesh.single(), **how)
    for mode, pattern in MODES:
        assert_same(gradients(with_recompute(tiny(model), mode, pattern), Mesh.single(), **how), expected)


def on_two_ranks(name: str, sequence_parallel: bool) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    model, how = CASES[name]
    config = tiny(model | {"layers": 2}, tp=2, sequence_parallel=sequence_parallel)
    expected = gradients(config, mesh, **how)
    for mode, pattern in MODES[:3]:
        assert_same(gradients(with_recompute(config, mode, pattern), mesh, **how), expected)


@pytest.mark.parametrize(
    ("name", "sequence_parallel"), [("llama", True), ("gpt2", False), ("extra_values", True), ("own_gradients", True)]
)
def test_loss_and_gradients_stay_bitwise_on_tensor_parallel_ranks(name, sequence_parallel):
    run_ranks(on_two_ranks, 2, name, sequence_parallel)


# What is sent again, in units of B·S·D elements: each reduction of a sum counts 2 (t-1)/t, a gather or scatter (t-1)/t.
# A product at the end of what is recomputed is not done again, unless dropout behind it wants to know its mask.
SENT_AGAIN = {
    ("full", None): {(False, 0.0): 2, (False, 0.1): 4, (True, 0.0): 3, (True, 0.1): 4},
    ("pattern", r"blocks\.\d+\.mlp"): {(False, 0.0): 0, (False, 0.1): 0, (True, 0.0): 1, (True, 0.1): 1},
    ("pattern", r"blocks\.\d+\.attention"): {(False, 0.0): 0, (False, 0.1): 0, (True, 0.0): 1, (True, 0.1): 1},
    ("selective", None): {(False, 0.0): 0, (False, 0.1): 0, (True, 0.0): 0, (True, 0.1): 0},
}


def sent(config: TrainConfig, mesh: Mesh) -> int:
    decoder = build(config, mesh, head=False)
    mesh.ledger.reset()
    decoder({}, microbatch())["hidden"].sum().backward()
    return mesh.ledger.total("tp").wire_bytes


def sent_again(sequence_parallel: bool, dropout: float) -> dict[tuple[str, str | None], float]:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    config = tiny(LLAMA | {"layers": 1, "dropout": dropout}, tp=2, sequence_parallel=sequence_parallel)
    unit = 2 * 8 * 16 * 8 * (mesh[Axis.TP].size - 1) / mesh[Axis.TP].size
    plain = sent(config, mesh)
    return {how: (sent(with_recompute(config, *how), mesh) - plain) / unit for how in SENT_AGAIN}


@pytest.mark.parametrize(("sequence_parallel", "dropout"), SENT_AGAIN["full", None])
def test_collectives_are_sent_again_up_to_the_last_saved_tensor(sequence_parallel, dropout):
    expected = {how: units[sequence_parallel, dropout] for how, units in SENT_AGAIN.items()}
    assert run_ranks(sent_again, 2, sequence_parallel, dropout) == [expected] * 2


class CountingBlock(Block):
    """Counts its calls, and those of them that are no repetition."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = self.first = 0

    def forward(self, hidden_BSD, context=None):
        self.calls += 1
        self.first += not context.recomputing
        return super().forward(hidden_BSD, context)


def test_a_layer_knows_the_second_run_and_may_count_once():
    decoder = build(with_recompute(tiny(LLAMA | {"block": target("CountingBlock")}), "full"), Mesh.single())
    decoder({}, microbatch()).objective.backward()
    assert [(block.calls, block.first) for block in decoder.blocks.values()] == [(2, 1), (2, 1)]
    with torch.no_grad():
        decoder({}, microbatch())
    assert [(block.calls, block.first) for block in decoder.blocks.values()] == [(3, 2), (3, 2)]


def test_names_classes_and_parameters_of_blocks_do_not_change():
    plain = build(tiny(LLAMA | {"block": target("CountingBlock")}), Mesh.single())
    made = build(with_recompute(plain.config, "full"), Mesh.single())
    assert [name for name, _ in made.named_modules()] == [name for name, _ in plain.named_modules()]
    assert isinstance(made.blocks["0"], CountingBlock) and repr(made) == repr(plain)


class NoisyMLP(ParallelMLP):
    """Draws from torch's generator, as a layer from elsewhere may."""

    def activate(self, up: Tensor) -> Tensor:
        return F.dropout(super().activate(up), 0.5)


@pytest.mark.parametrize(("mode", "pattern"), [("full", None), MLPS])
def test_a_layer_that_draws_from_torch_draws_the_same_again(mode, pattern):
    config = tiny(LLAMA | {"mlp": target("NoisyMLP")})
    torch.manual_seed(0)
    expected = gradients(config, Mesh.single())
    torch.manual_seed(0)
    assert_same(gradients(with_recompute(config, mode, pattern), Mesh.single()), expected)


@pytest.mark.parametrize(("kind", "message"), [("shape", "where it had saved"), ("fewer", "saved fewer tensors")])
def test_a_layer_that_saves_other_tensors_is_rejected(kind, message):
    class Fickle(nn.Module):
        turn = 0

        def forward(self, x):
            self.turn += 1
            if self.turn > 1:
                return x[:1].sin().cos() if kind == "shape" else x.sin()
            return x.sin().cos()

    loss = recompute(Fickle().forward, torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(MegastackError, match=message):
        loss.backward()


def test_one_inside_another_and_keyword_arguments():
    def inner(x: Tensor, *, scale: Tensor) -> Tensor:
        return (x * scale).sin().exp()

    def outer(x: Tensor, scale: Tensor, run: Any) -> Tensor:
        return run(inner, x.cos(), scale=scale).square().tanh()

    results = []
    for run in (recompute, lambda function, *args, **kwargs: function(*args, **kwargs)):
        x, scale = torch.arange(6.0).requires_grad_(), torch.tensor(0.3, requires_grad=True)
        run(outer, x * 1, scale, run).sum().backward()
        results.append([x.grad, scale.grad])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("mode", "pattern", "message"),
    [
        ("pattern", r"blocks\.7", r"recompute.pattern=blocks\\.7: matches the whole name of no module"),
        ("pattern", "mlp", "recompute.pattern=mlp: matches the whole name of no module"),
        (
            "pattern",
            r"blocks\.0\.mlp\.up",
            r"blocks.0.mlp.up is a linear layer.*; use the layer it belongs to, blocks.0.mlp",
        ),
        ("selective", None, "recompute.mode=selective: block 0, a Block, has no ParallelAttention"),
    ],
)
def test_a_choice_that_matches_nothing_is_rejected(mode, pattern, message):
    model = LLAMA | ({"attention": target("NoAttention")} if mode == "selective" else {})
    with pytest.raises(ConfigError, match=message):
        build(with_recompute(tiny(model), mode, pattern), Mesh.single())


class NoAttention(nn.Module):
    """Not a ParallelAttention."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def test_a_stage_without_a_match_is_fine_where_another_has_one():
    config = with_recompute(tiny(LLAMA | {"layers": 4}), "pattern", r"blocks\.3")
    stage = build(config, Mesh.single(), layers=range(2))
    assert [type(block) for block in stage.blocks.values()] == [Block, Block]
