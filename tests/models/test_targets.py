"""Layers named by ``_target_``: what they are called with, and what is refused."""

from __future__ import annotations

import pytest
from torch import nn

from megastack.errors import ConfigError
from megastack.layers.attention import ParallelAttention
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.models.targets import import_target, layer_factory
from tests.models.model_cases import GPT2, LLAMA, QWEN, build, microbatch, tiny


class PlainAttention(ParallelAttention):
    """Takes exactly the documented arguments."""

    def __init__(
        self,
        hidden,
        heads,
        mesh,
        *,
        kv_groups=None,
        head_dim=None,
        rope=None,
        qk_norm=False,
        bias=False,
        sequence_parallel=False,
    ):
        super().__init__(hidden, heads, mesh, kv_groups=kv_groups, head_dim=head_dim, rope=rope, qk_norm=qk_norm)
        self.given = (hidden, heads, kv_groups, head_dim, qk_norm, bias, sequence_parallel)


class WideMLP(ParallelMLP):
    def __init__(self, hidden, ffn, mesh, *, width=1, **kwargs):
        super().__init__(hidden, width * ffn, mesh, **kwargs)


def not_a_module(*args, **kwargs):
    return "text"


def picky(*args, **kwargs):
    raise ValueError("width=0: must be positive")


NOT_CALLABLE = 3


def broken(*args: object, **options: object) -> None:
    raise RuntimeError("no such weather")


def leaving(*args: object, **options: object) -> None:
    raise SystemExit(3)


def own(name: str, **options) -> dict[str, object]:
    return {"_target_": f"{__name__}.{name}", **options}


def test_an_attention_with_the_documented_arguments_gets_them():
    model = LLAMA | {"attention": own("PlainAttention"), "head_dim": 6, "qk_norm": True}
    layer = build(tiny(model), Mesh.single()).blocks["0"].attention
    assert type(layer) is PlainAttention
    assert layer.given == (16, 4, 2, 6, True, False, False)


def test_keys_beside_the_target_are_passed_on_and_the_rest_comes_from_the_parent():
    decoder = build(tiny(GPT2 | {"mlp": own("WideMLP", width=3)}), Mesh.single())
    layer = decoder.blocks["1"].mlp
    assert layer.up.weight.shape == (96, 16) and layer.up.bias is not None
    assert layer.down.spec.init.std == pytest.approx(0.1)
    decoder({}, microbatch())


def test_an_option_that_a_layer_does_not_take_is_refused_and_not_dropped():
    for option, value in (("qkv_bias", True), ("attention_dropout", 0.1)):
        with pytest.raises(ConfigError, match=rf"model.{option}={value}: .*PlainAttention does not take it"):
            build(tiny(LLAMA | {"attention": own("PlainAttention"), option: value}), Mesh.single())
    build(tiny(QWEN | {"attention": own("PlainAttention"), "qkv_bias": False}), Mesh.single())


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({}, "must name a layer"),
        ({"width": 3}, "must name a layer"),
        (f"{__name__}.WideMLP", "must name a layer"),
        ({"_target_": "WideMLP"}, "must name a layer"),
        ({"_target_": "no_such_file.WideMLP"}, "ModuleNotFoundError.*current folder"),
        (own("WiderMLP"), "no class or function WiderMLP; use WideMLP"),
        (own("NOT_CALLABLE"), "no class or function NOT_CALLABLE"),
        (own("WideMLP", depth=3), r"cannot be called.*unexpected keyword argument 'depth'"),
        ({"_target_": "builtins.dict"}, "cannot be called"),
        (own("picky"), "refuses its arguments: width=0"),
        (own("broken"), r"cannot be built, RuntimeError: no such weather \(test_targets.py, line \d+\)"),
        (own("leaving"), r"cannot be built, SystemExit: 3 "),
        (own("NOT_CALLABLE"), "no class or function NOT_CALLABLE; use (?!NOT_CALLABLE)"),
        (own("not_a_module"), "made a str; use a torch module"),
    ],
    ids=str,
)
def test_a_target_that_cannot_be_used_is_refused_with_its_key(spec, says):
    with pytest.raises(ConfigError, match=f"(?s)model.mlp.*{says}"):
        build(tiny(LLAMA | {"mlp": spec}), Mesh.single())


def test_any_callable_that_makes_a_module_will_do():
    assert import_target("model.mlp", {"_target_": "torch.nn.Identity"}) is nn.Identity
    assert isinstance(layer_factory("model.mlp", {"_target_": "torch.nn.Identity"}, ParallelMLP)(1, 2), nn.Identity)
