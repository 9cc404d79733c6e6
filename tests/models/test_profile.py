"""Counts and costs from the configuration alone, against the built model and against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megastack.config.choices import OptimizerName
from megastack.config.schema import ModelOptions, OptimOptions, PrecisionOptions, ZeroOptions
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.models.decoder import Decoder
from megastack.models.profile import (
    flops_per_token,
    matmul_parameters,
    rank_parameters,
    stage_placements,
    static_bytes,
    total_parameters,
    unit_costs,
    unit_parameters,
)
from megastack.models.specs import decoder_spec
from megastack.placement.module import placements_of
from tests.models.model_cases import GPT2, LLAMA, QWEN, tiny

BY_HAND = {
    "layers": 2,
    "heads": 2,
    "hidden": 8,
    "ffn": 16,
    "vocab": 32,
    "kv_groups": 1,
    "vocab_multiple": 8,
}
VARIANTS = {
    "llama": LLAMA,
    "mqa_tied": LLAMA | {"kv_groups": 1, "tied": True},
    "qwen": QWEN,
    "gpt2": GPT2 | {"max_positions": 20},
    "gpt2_untied": GPT2 | {"tied": False},
    "mixed": LLAMA | {"norm": "layer", "activation": "gelu", "bias": True, "vocab_multiple": 64},
}


class Alone(Mesh):
    """A rank that may be asked for its groups but not to communicate."""

    def _axis_group(self, axes, label):
        group = super()._axis_group((), label)
        return replace(group, rank=self.rank, size=self.shape.tp) if axes else group


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_counts_equal_the_built_model_on_every_rank_of_every_stage(name, tp):
    config = tiny(VARIANTS[name] | {"layers": 4}, tp=tp)
    stages = [(range(1), True, False), (range(1, 3), False, False), (range(3, 4), False, True), (range(4), True, True)]
    for layers, embedding, head in stages:
        for rank in range(tp):
            mesh = Alone(MeshShape(tp=tp), rank, torch.device("cpu"), None)
            with torch.device("meta"):
                decoder = Decoder(config, mesh, layers=layers, embedding=embedding, head=head)
            expected = sum(parameter.numel() for parameter in decoder.parameters())
            assert rank_parameters(config, layers, embedding=embedding, head=head) == expected
            assert stage_placements(config, layers, embedding=embedding, head=head) == placements_of(decoder)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_total_counts_each_element_once(name):
    config = tiny(VARIANTS[name])
    placements = placements_of(Decoder(config, Mesh.single()))
    assert total_parameters(config) == sum(placement.numel for placement in placements.values())
    assert total_parameters(tiny(VARIANTS[name], tp=4)) == total_parameters(config)


def test_an_uneven_split_is_embedding_blocks_and_head():
    config = tiny(LLAMA | {"layers": 8})
    units = unit_parameters(config)
    assert units.embedding == 37 * 16
    assert units.block == 16 + 16 * 16 + 2 * 2 * 4 * 16 + 16 * 16 + 16 + 3 * 32 * 16
    assert units.head == 16 + 37 * 16
    assert unit_parameters(tiny(LLAMA | {"tied": True})).head == 16
    padding, first = (40 - 37) * 16, 0
    for stage, layers in enumerate((1, 2, 2, 3)):
        count = rank_parameters(config, range(first, first + layers), embedding=stage == 0, head=stage == 3)
        ends = (units.embedding + padding if stage == 0 else 0) + (units.head + padding if stage == 3 else 0)
        assert count == layers * units.block + ends
        first += layers


def test_flops_by_hand():
    config = tiny(BY_HAND)
    config = replace(config, batch=replace(config.batch, sequence_length=4))
    assert matmul_parameters(config) == 1408
    assert flops_per_token(config, causal=False) == 9216
    assert flops_per_token(config) == 8832
    tied = replace(config, model=replace(config.model, tied=True))
    assert (matmul_parameters(tied), flops_per_token(tied)) == (1408, 8832)
    padded = replace(config, model=replace(config.model, vocab_multiple=128))
    assert flops_per_token(padded) == 8832


def test_published_sizes():
    def count(**model) -> int:
        config = tiny(LLAMA)
        return total_parameters(replace(config, model=replace(ModelOptions(**LLAMA), **model)))

    llama3_8b = {"layers": 32, "heads": 32, "hidden": 4096, "ffn": 14336, "vocab": 128256, "kv_groups": 8}
    assert count(**llama3_8b) == 8_030_261_248
    llama3_405b = {"layers": 126, "heads": 128, "hidden": 16384, "ffn": 53248, "vocab": 128256, "kv_groups": 8}
    assert count(**llama3_405b) == 405_853_388_800
    gpt2 = tiny(GPT2 | {"layers": 12, "heads": 12, "hidden": 768, "ffn": 3072, "vocab": 50257, "max_positions": 1024})
    assert total_parameters(gpt2) == 124_439_808
    qwen3_8b = {"layers": 36, "heads": 32, "hidden": 4096, "ffn": 12288, "vocab": 151936, "kv_groups": 8}
    assert count(**qwen3_8b, head_dim=128, qk_norm=True) == 8_190_735_360


@pytest.mark.parametrize(
    ("compute", "optimizer", "per_parameter"),
    [
        ("fp32", {}, 16),
        ("fp64", {}, 32),
        ("bf16", {}, 18),
        ("fp32", {"name": "sgd"}, 8),
        ("fp32", {"name": "sgd", "momentum": 0.9}, 12),
    ],
)
def test_bytes_per_parameter(compute, optimizer, per_parameter):
    precision = PrecisionOptions(compute=type(PrecisionOptions().compute)(compute), keep_fp32=[])
    if "name" in optimizer:
        optimizer = optimizer | {"name": OptimizerName(optimizer["name"])}
    config = replace(tiny(LLAMA), precision=precision, optim=OptimOptions(**optimizer))
    whole = {"layers": range(2), "embedding": True, "head": True}
    assert static_bytes(config, **whole).total == per_parameter * rank_parameters(config, **whole)


def test_bytes_of_norms_frozen_weights_and_shared_optimizer_state():
    whole = {"layers": range(2), "embedding": True, "head": True}
    config = replace(tiny(LLAMA), precision=PrecisionOptions(compute=type(PrecisionOptions().compute)("bf16")))
    count, norms = rank_parameters(config, **whole), 5 * 16
    assert static_bytes(config, **whole).total == 18 * (count - norms) + 16 * norms
    frozen = replace(config, optim=OptimOptions(freeze=["^embedding"]))
    assert static_bytes(frozen, **whole).total == 18 * (count - norms - 640) + 16 * norms + 2 * 640
    shared = replace(config, parallel=replace(config.parallel, dp=4, zero=ZeroOptions(stage=1)))
    assert static_bytes(shared, **whole).optimizer * 4 == static_bytes(config, **whole).optimizer
    assert static_bytes(shared, **whole).gradients == static_bytes(config, **whole).gradients


def test_costs_of_the_ends_follow_vocabulary_and_width():
    costs = unit_costs(tiny(LLAMA))
    assert costs.block == 1 and 0 < costs.first < costs.last
    assert unit_costs(tiny(LLAMA | {"vocab": 3700})).last > 50 * costs.last
    big = tiny(LLAMA | {"hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 128256, "kv_groups": 8, "layers": 32})
    assert unit_costs(big).first < 0.01 and 2 < unit_costs(big).last < 2.6


def test_small_facts():
    assert decoder_spec(tiny(LLAMA)).embedding.padded == 40
    rows = [decoder_spec(tiny(GPT2 | sizes)).positions.max_positions for sizes in ({}, {"max_positions": 20})]
    assert rows == [8, 20]


def test_it_needs_no_torch():
    code = "import sys, megastack.models.profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
