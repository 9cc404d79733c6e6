"""Each fact about a layer has one home: the fields of the specs are arguments of the layers and configuration keys."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields

import pytest

from megastack.config.schema import ModelOptions
from megastack.layers.attention import ParallelAttention
from megastack.layers.attention_spec import AttentionSpec
from megastack.layers.mlp import ParallelMLP
from megastack.layers.mlp_spec import MLPSpec
from megastack.layers.spec import LocalMicrobatch, NormSpec, SavedTensor, spec_of
from megastack.mesh.mesh import Mesh
from megastack.models.specs import decoder_spec
from megastack.placement.module import placements_of
from tests.models.model_cases import GPT2, LLAMA, QWEN, tiny

DERIVED = {"rotary", "sequence_parallel", "init", "out_init"}
"""Fields that come from other keys, or from the layout."""


@pytest.mark.parametrize(("spec", "layer"), [(AttentionSpec, ParallelAttention), (MLPSpec, ParallelMLP)])
def test_a_field_of_a_spec_is_an_argument_of_the_layer_and_a_key_of_the_configuration(spec: type, layer: type) -> None:
    names = {each.name for each in fields(spec)}
    assert names - DERIVED <= {each.name for each in fields(ModelOptions)}
    assert names - {"rotary"} == set(inspect.signature(layer).parameters) - {"mesh", "rope"}


@pytest.mark.parametrize("model", [LLAMA, QWEN, GPT2])
def test_a_layer_has_the_parameters_of_its_spec(model: dict[str, object]) -> None:
    block = decoder_spec(tiny(model)).block
    options = {each.name: getattr(block.mlp, each.name) for each in fields(MLPSpec)[2:]}
    mlp = ParallelMLP(block.mlp.hidden, block.mlp.ffn, Mesh.single(), **options)
    assert mlp.spec == block.mlp and placements_of(mlp) == block.mlp.placements()


def test_a_spec_takes_its_fields_from_options_of_the_same_name() -> None:
    @dataclass(frozen=True)
    class Options:
        hidden: int = 8
        heads: int = 2
        qk_norm: bool = True
        ffn: int = 3

    assert spec_of(AttentionSpec, Options(), rotary=True) == AttentionSpec(8, 2, rotary=True, qk_norm=True)


def test_the_statistics_of_a_norm_are_named_after_it() -> None:
    microbatch = LocalMicrobatch(batch=2, sequence=8, rows=4, tp=2, width=2)
    found = NormSpec(16, "layer").statistics("norm", (2, 4), microbatch.wide)
    assert found == [SavedTensor("norm mean", (2, 4), 4), SavedTensor("norm scale", (2, 4), 4)]
    assert [tensor.bytes for tensor in found] == [32, 32]
