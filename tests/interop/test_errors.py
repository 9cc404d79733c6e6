"""Unsupported or invalid models are errors that give the reason, before anything is written; exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megastack.cli import main
from megastack.config.choices import Activation, Norm, Positions
from megastack.config.schema import ModelOptions
from megastack.errors import ConfigError
from megastack.interop import proof
from megastack.interop.hub_config import read_hub_config
from megastack.interop.hub_export import choose_architecture
from tests.interop.hub_folders import CONFIGS, LLAMA, stored, tensors, write

SMALL = {"num_hidden_layers": 1}


def import_error(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The message of a rejected import, which leaves nothing behind."""
    out = folder.parent / "out"
    assert main(["import", str(folder), "--out", str(out), "--proof", "reference", *more]) == 78
    assert not out.exists() and not list(folder.parent.glob(".out*"))
    return capsys.readouterr().err


def test_a_folder_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "x", LLAMA | SMALL)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no weights" in (text := import_error(folder, capsys)) and "pytorch_model.bin is pickled" in text
    assert "no such folder" in import_error(tmp_path / "nowhere", capsys)
    (folder / "config.json").unlink()
    assert "config.json: no such file" in import_error(folder, capsys)
    (folder / "config.json").write_text("{")
    assert "not readable as JSON" in import_error(folder, capsys)


def test_a_truncated_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "x", LLAMA | SMALL, files=2)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert f"{file}: truncated" in import_error(folder, capsys)
    file.write_bytes(b"abc")
    assert f"{file}: truncated" in import_error(folder, capsys)


def test_an_index_that_does_not_match_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "x", LLAMA | SMALL, files=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = list(content["weight_map"])
    content["weight_map"][names[0]] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert f"{names[0]} not in the file that it names" in import_error(folder, capsys)
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "names model-00001-of-00002.safetensors, which is missing" in import_error(folder, capsys)
    index.write_text("{}")
    assert "weight_map" in import_error(folder, capsys)


def test_tensors_that_do_not_match_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = LLAMA | SMALL
    named = tensors(values)
    lost = named.pop("model.layers.0.mlp.up_proj.weight")
    named["model.layers.0.mlp.gate_proj.weight"] = lost[:-1].clone()
    named["model.layers.0.mlp.router.weight"] = lost
    named["model.norm.weight"] = named["model.norm.weight"].to(torch.int8)
    text = import_error(write(tmp_path / "x", values, named), capsys)
    assert "missing: model.layers.0.mlp.up_proj.weight" in text
    assert "not known to this architecture: model.layers.0.mlp.router.weight" in text
    assert "model.layers.0.mlp.gate_proj.weight is (23, 16), must be (24, 16)" in text
    assert "model.norm.weight is I8; quantised" in text


def test_vocabularies_that_do_not_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = LLAMA | SMALL
    folder = write(tmp_path / "x", values | {"vocab_size": 36}, tensors(values))
    assert "model.embed_tokens.weight has 37 rows, vocab_size=36" in import_error(folder, capsys)
    (folder / "config.json").write_text(json.dumps(values))
    added = [{"id": 37, "content": "<new>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    assert "tokenizer.json has 38 ids, vocab_size=37" in import_error(folder, capsys)


def test_a_tied_head_with_its_own_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = LLAMA | SMALL
    folder = write(tmp_path / "x", values | {"tie_word_embeddings": True}, tensors(values))
    assert "lm_head.weight differs from model.embed_tokens.weight" in import_error(folder, capsys)


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("llama2", {"model_type": "bert"}, "model_type=bert: unknown architecture; use llama (LlamaForCausalLM), mistral"),
    ("llama2", {"architectures": ["LlamaForSequenceClassification"]}, "must be LlamaForCausalLM"),
    ("llama2", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ("llama2", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
    ("llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=null"),
    ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_theta=500000.0"),
    ("llama2", {"rope_interleaved": True}, "half-split"),
    ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama2", {"attention_bias": True}, "attention_bias=true: with mlp_bias=false"),
    ("llama2", {"quantization_config": {"bits": 4}}, "quantised"),
    ("llama2", {"num_hidden_layers": "many"}, "num_hidden_layers=many"),
    ("mistral", {"sliding_window": 63}, "sliding_window=63: attention covers the whole sequence"),
    ("qwen2", {"use_sliding_window": True}, "sliding_window=4"),
    ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types=[linear_attention]"),
    ("gpt2", {"activation_function": "gelu"}, "activation_function=gelu"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=true"),
    ("gpt2", {"embd_pdrop": 0.0}, "share one rate"),
]


@pytest.mark.parametrize(("family", "change", "reason"), UNSUPPORTED, ids=[reason for _, _, reason in UNSUPPORTED])
def test_features_that_the_decoder_lacks(family: str, change: dict[str, Any], reason: str) -> None:
    read_hub_config(CONFIGS[family])
    with pytest.raises(ConfigError) as raised:
        read_hub_config(CONFIGS[family] | change)
    assert reason in str(raised.value)


def test_every_error_is_in_one_report() -> None:
    with pytest.raises(ConfigError) as raised:
        read_hub_config(CONFIGS["llama2"] | {"hidden_act": "relu", "rope_interleaved": True, "mlp_bias": True})
    assert len(raised.value.violations) == 3


def test_a_window_at_least_as_long_as_the_sequences_is_accepted() -> None:
    wide = CONFIGS["mistral"] | {"sliding_window": 16}
    assert read_hub_config(wide, sequence_length=16).options.layers == 3
    with pytest.raises(ConfigError, match="--sequence-length 16 or less"):
        read_hub_config(wide, sequence_length=17)


def test_unread_keys_are_reported() -> None:
    assert read_hub_config(LLAMA | {"attn_logit_softcapping": 30.0}).unread == ("attn_logit_softcapping",)
    assert read_hub_config(LLAMA).unread == ()


LLAMA_TINY = ModelOptions(layers=1, heads=4, hidden=16, ffn=24, vocab=37)
GPT2_TINY = replace(
    LLAMA_TINY, norm=Norm.layer, activation=Activation.gelu, positions=Positions.learned, bias=True, tied=True
)
EXPORTS: list[tuple[ModelOptions, dict[str, Any], str | None, str]] = [
    (LLAMA_TINY, {"norm": Norm.layer}, "llama", "model.norm=layer: LlamaForCausalLM cannot express it; use rms"),
    (LLAMA_TINY, {"norm": Norm.layer}, "qwen3", "model.qk_norm=false: Qwen3ForCausalLM cannot express it; use true"),
    (LLAMA_TINY, {"norm": Norm.layer}, None, "model.activation=swiglu: GPT2LMHeadModel cannot express it; use gelu"),
    (LLAMA_TINY, {"qkv_bias": True}, "llama", "use --architecture qwen2"),
    (LLAMA_TINY, {"qkv_bias": True, "qk_norm": True}, None, "model.qkv_bias=true: Qwen3ForCausalLM"),
    (LLAMA_TINY, {"bias": True}, "mistral", "model.bias=true"),
    (GPT2_TINY, {"kv_groups": 2}, None, "model.kv_groups=2"),
    (GPT2_TINY, {"head_dim": 8}, None, "model.head_dim=8"),
    (GPT2_TINY, {"bias": False}, None, "model.bias=false"),
    (LLAMA_TINY, {"mlp": {"_target_": "my.Own"}}, None, "custom layers have no counterpart"),
    (LLAMA_TINY, {}, "bert", "--architecture=bert: unknown architecture; use llama, mistral"),
]


@pytest.mark.parametrize(("model", "change", "name", "reason"), EXPORTS, ids=[case[-1] for case in EXPORTS])
def test_options_that_the_class_cannot_express(
    model: ModelOptions, change: dict[str, Any], name: str | None, reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        choose_architecture(replace(model, **change), name)
    assert reason in str(raised.value)


def test_the_class_follows_from_the_features() -> None:
    changes = [{}, {"bias": True}, {"qkv_bias": True}, {"qk_norm": True}]
    names = [choose_architecture(replace(LLAMA_TINY, **change)).name for change in changes]
    assert [*names, choose_architecture(GPT2_TINY).name] == ["llama", "llama", "qwen2", "qwen3", "gpt2"]


def test_the_commands_import_and_export_with_the_configuration_of_the_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "Tiny-Llama", LLAMA | SMALL)
    record = tmp_path / "record.json"
    arguments = ["--out", str(tmp_path / "in"), "--proof", "reference", "--json", str(record)]
    assert main(["import", str(folder), *arguments]) == 0
    text = capsys.readouterr().out
    assert "plain reference" in text and "largest difference" in text and "model=tiny_llama" in text
    assert json.loads(record.read_text())["proof"]["holds"] is True
    assert main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--proof", "reference"]) == 0
    assert stored(tmp_path / "out").keys() == tensors(LLAMA | SMALL).keys()
    capsys.readouterr()
    assert main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 78
    assert "is taken" in capsys.readouterr().err
    other = ["model=llama_tiny", "--config-dir", str(tmp_path / "in")]
    assert main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "new"), *other]) == 78
    assert "blocks.1.attention.q.weight" in capsys.readouterr().err
    (tmp_path / "in" / "model" / "tiny_llama.yaml").unlink()
    assert main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "new")]) == 78
    assert "use model=NAME" in capsys.readouterr().err
    file = tmp_path / "in" / "weights" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    whole = ["model=llama_tiny"]
    assert main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "new"), *whole]) == 78
    assert "truncated" in capsys.readouterr().err


def test_a_failed_proof_exits_1_and_removes_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "x", LLAMA | SMALL)
    reference = proof.hub_logits
    monkeypatch.setattr(proof, "hub_logits", lambda *given: reference(*given) + 1e-6)
    assert main(["import", str(folder), "--out", str(tmp_path / "in"), "--proof", "reference"]) == 1
    text = capsys.readouterr().out
    assert "DIFFERENT" in text and "nothing was kept" in text and not (tmp_path / "in").exists()
    monkeypatch.setattr(proof, "hub_logits", lambda *given: reference(*given) * float("nan"))
    assert main(["import", str(folder), "--out", str(tmp_path / "in"), "--proof", "reference"]) == 1


def make_run(folder: Path) -> Path:
    """A run folder without a checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {}\n")
    return folder


@pytest.mark.parametrize("verb", ["export", "generate", "evaluate"])
def test_a_path_without_a_checkpoint_is_an_error_that_says_what_it_is(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = write(tmp_path / "hub", LLAMA | SMALL)
    run, torn = make_run(tmp_path / "run"), make_run(tmp_path / "torn")
    (torn / "checkpoints" / "step_00000007").mkdir()
    cases = {
        tmp_path / "gone": "no such folder); use the folder of a checkpoint or of a run",
        run / "config.yaml": "is a file); use the folder of",
        run: f"{run}: no usable checkpoint (the run has written none); use checkpoint.at_end=true",
        torn: f"{torn}: no usable checkpoint ({torn}/checkpoints/step_00000007",
        torn / "checkpoints": f"{torn}/checkpoints: no usable checkpoint ({torn}/checkpoints/step_00000007",
        torn / "checkpoints" / "step_00000007": "manifest.json: missing",
        hub: f"{hub}: no usable checkpoint (a Hugging Face folder); use the output of megastack import",
    }
    more = {"export": ["--out", str(tmp_path / "out")], "generate": ["--prompt", "a"], "evaluate": []}[verb]
    for path, reason in cases.items():
        assert main([verb, str(path), *more]) == 78
        text = capsys.readouterr().err
        assert reason in text and "configuration" not in text, text
    assert not (tmp_path / "out").exists()


def test_folders_that_need_no_import_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(write(tmp_path / "hub", LLAMA | SMALL)), "--out", str(tmp_path / "in")]) == 0
    assert "is already imported" in import_error(tmp_path / "in", capsys)
    assert "use it without an import" in import_error(tmp_path / "in" / "weights", capsys)
    assert "use it without an import" in import_error(make_run(tmp_path / "run"), capsys)


def test_a_checkpoint_alone_requires_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(write(tmp_path / "hub", LLAMA | SMALL)), "--out", str(tmp_path / "in")]) == 0
    (tmp_path / "in" / "weights").rename(tmp_path / "alone")
    for verb in (["export", "--out", str(tmp_path / "out")], ["generate", "--prompt", "a"], ["evaluate"]):
        assert main([verb[0], str(tmp_path / "alone"), *verb[1:]]) == 78
        assert "has no configuration next to it; use model=NAME" in capsys.readouterr().err


def test_keys_of_the_command_line_override_the_configuration(tmp_path: Path) -> None:
    assert main(["import", str(write(tmp_path / "hub", LLAMA | SMALL)), "--out", str(tmp_path / "in")]) == 0
    assert main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "model.init_std=0.5"]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["initializer_range"], written["num_hidden_layers"]) == (0.5, 1)
