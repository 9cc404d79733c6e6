"""The options that a decoder reads, without a run around them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megastack.config.schema import LossOptions, ModelOptions
from megastack.errors import ConfigError
from megastack.mesh.mesh import Mesh
from megastack.models.config import ModelConfig
from megastack.models.decoder import Decoder
from tests.models.model_cases import GPT2, LLAMA, build, microbatch, tiny


def test_a_model_config_builds_the_decoder_of_the_run() -> None:
    run = tiny(GPT2 | {"dropout": 0.1}, label_smoothing=0.1)
    config = ModelConfig(model=run.model, loss=run.loss, seed=run.seed, sequence_length=run.batch.sequence_length)
    assert ModelConfig.of(run) == ModelConfig.of(config) == config
    decoders = [build(run, Mesh.single()), Decoder(config, Mesh.single()).double()]
    decoders[1].load_state_dict(decoders[0].state_dict())
    losses = [decoder({}, microbatch()).objective for decoder in decoders]
    assert torch.equal(*losses)
    assert decoders[0].config == decoders[1].config == config


def test_only_the_model_is_required() -> None:
    decoder = Decoder(ModelConfig(model=ModelOptions(layers=1, heads=2, hidden=8, ffn=8, vocab=16)), Mesh.single())
    assert decoder.config.loss == LossOptions() and decoder.has_embedding and decoder.has_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 2.0}, "model.dropout=2.0: must be at least 0 and below 1"),
        ({"layers": "two"}, "model.layers=two: must be a whole number"),
        (
            {"positions": "learned"},
            "model.max_positions=null: must be set where positions are learned and no sequence_length is given; "
            "use the longest sequence",
        ),
    ],
)
def test_an_invalid_value_is_rejected_by_its_key(changes: dict[str, object], message: str) -> None:
    config = ModelConfig(model=replace(tiny(LLAMA).model, **changes))
    with pytest.raises(ConfigError, match=message):
        Decoder(config, Mesh.single())


def test_something_else_is_rejected() -> None:
    with pytest.raises(ConfigError, match="config=dict: must be a TrainConfig"):
        Decoder({"layers": 2}, Mesh.single())


def test_it_needs_no_torch() -> None:
    code = "import sys, megastack.models.specs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
