"""The defaults of each class, compared with transformers if it is installed; and errors of single keys."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megastack.errors import ConfigError
from megastack.interop.config_keys import ALIASES, KEYS, is_of_kind, with_defaults
from megastack.interop.hub_config import ARCHITECTURES, read_hub_config
from megastack.interop.hub_folder import HubFolder
from megastack.interop.transfer import import_model
from tests.interop.hub_folders import CONFIGS, LLAMA, LLAMA3_SCALING, tensors, write

ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
"""Keys that transformers moves into rope_parameters."""
FAMILIES = list(KEYS)


def bare(family: str, **changes: Any) -> dict[str, Any]:
    """A file without any keys."""
    return {"model_type": family} | changes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_what_the_classes_of_transformers_define(family: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    kind = type(transformers.AutoConfig.for_model(family))
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, key in KEYS[family].items():
        if name not in ROPE and not (family == "qwen2" and name == "head_dim"):  # these two are not fields
            assert fields[name].default == key.default, name
    assert ALIASES.get(family, {}) == kind.attribute_map
    if family != "gpt2":
        assert kind.default_theta == KEYS[family]["rope_theta"].default


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_legal_where_the_class_accepts_it_and_nowhere_else(family: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5")
    for name in sorted(KEYS[family].keys() - ROPE):
        if KEYS[family][name].nullable:
            transformers.AutoConfig.for_model(family, **{name: None})
            continue
        with pytest.raises(Exception, match=name):
            transformers.AutoConfig.for_model(family, **{name: None})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_default_is_of_its_kind(family: str) -> None:
    for name, key in KEYS[family].items():
        assert is_of_kind(key.default, key.kind) if key.default is not None else key.nullable, name


def test_absent_keys_have_the_defaults_of_their_class() -> None:
    llama, length = read_hub_config(bare("llama")), 2048
    assert (llama.context, llama.options.kv_groups, llama.options.ffn, llama.options.norm_eps) == (
        length,
        None,
        11008,
        1e-6,
    )
    mistral = read_hub_config(bare("mistral"), sequence_length=4096)
    assert (mistral.context, mistral.options.kv_groups, mistral.window) == (131072, 8, 4096)
    qwen2 = read_hub_config(bare("qwen2"))
    assert (qwen2.context, qwen2.options.kv_groups, qwen2.options.qkv_bias, qwen2.window) == (32768, None, True, None)
    qwen3 = read_hub_config(bare("qwen3", num_attention_heads=64))
    assert (qwen3.options.head_dim, qwen3.options.kv_groups, qwen3.options.qk_norm) == (128, 32, True)
    gpt2 = read_hub_config(bare("gpt2"))
    assert (gpt2.context, gpt2.options.layers, gpt2.options.ffn, gpt2.options.tied) == (1024, 12, 4 * 768, True)
    assert gpt2.options.dropout == gpt2.options.attention_dropout == 0.1
    assert [read_hub_config(bare(family), sequence_length=8).options.tied for family in FAMILIES] == [
        family == "gpt2" for family in FAMILIES
    ]


def test_an_absent_window_of_mistral_is_the_default_and_null_is_none() -> None:
    with pytest.raises(ConfigError, match=r"sliding_window=4096: .* the class's default, .*use --sequence-length 4096"):
        read_hub_config(bare("mistral"))
    with pytest.raises(ConfigError, match="sliding_window=4096"):
        read_hub_config(bare("mistral", layer_types=["full_attention"] * 32))  # a key that the class does not read
    wide = read_hub_config(bare("mistral", sliding_window=None))
    assert (wide.context, wide.window) == (131072, None)


def test_the_window_of_qwen_starts_at_a_layer_or_follows_layer_types() -> None:
    values = bare("qwen2", use_sliding_window=True, num_hidden_layers=3)
    assert read_hub_config(values).window is None  # from layer 28 on
    narrow = values | {"max_window_layers": 2}
    with pytest.raises(ConfigError, match=r"sliding_window=4096: .* the class's default"):
        read_hub_config(narrow)
    assert read_hub_config(narrow, sequence_length=4096).window == 4096
    full, one = ["full_attention"] * 3, ["full_attention", "sliding_attention", "full_attention"]
    assert read_hub_config(narrow | {"layer_types": full}).window is None
    with pytest.raises(ConfigError, match="sliding_window=4096"):
        read_hub_config(values | {"layer_types": one})
    with pytest.raises(ConfigError, match=r"layer_types=.* needs use_sliding_window=true"):
        read_hub_config(bare("qwen3", num_hidden_layers=3, layer_types=one))
    with pytest.raises(ConfigError, match=r"layer_types=.* one kind for each of num_hidden_layers=3"):
        read_hub_config(values | {"layer_types": full[:2]})


def test_null_means_none_where_the_class_has_it_and_is_an_error_elsewhere() -> None:
    model = read_hub_config(bare("llama", num_key_value_heads=None, head_dim=None, attention_dropout=None)).options
    assert (model.kv_groups, model.head_dim, model.attention_dropout) == (None, None, 0.0)
    qwen = bare("qwen2", num_attention_heads=64, num_key_value_heads=None)
    assert read_hub_config(qwen).options.kv_groups is None  # one per head; 32 if the key is absent
    assert read_hub_config(bare("gpt2", n_inner=None)).options.ffn == 4 * 768
    for family, name in (("mistral", "num_key_value_heads"), ("qwen3", "head_dim"), ("llama", "rms_norm_eps")):
        with pytest.raises(ConfigError, match=f"{name}=null: must be a .*the class's default"):
            read_hub_config(bare(family, **{name: None}), sequence_length=8)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_size": "4096"}, "hidden_size=4096: must be a positive integer"),
    ("llama", {"hidden_size": True}, "hidden_size=true: must be a positive integer"),
    ("llama", {"hidden_size": 4096.0}, "hidden_size=4096.0: must be a positive integer"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps=1e-5: must be a number"),
    ("llama", {"rms_norm_eps": True}, "rms_norm_eps=true: must be a number"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1: must be true or false"),
    ("llama", {"attention_bias": "false"}, "attention_bias=false: must be true or false"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act=[silu]: must be a string"),
    ("llama", {"partial_rotary_factor": True}, "partial_rotary_factor=true: must be a number or null"),
    ("llama", {"rope_interleaved": 0}, "rope_interleaved=0"),
    ("llama", {"quantization_config": {}}, "quantization_config={}"),
    ("llama", {"eos_token_id": [2, "3"]}, "eos_token_id=[2, 3]: must be a token id or a list of them or null"),
    ("llama", {"bos_token_id": True}, "bos_token_id=true: must be a token id"),
    ("qwen2", {"layer_types": "full_attention"}, "layer_types=full_attention: must be a list of strings"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window=1: must be true or false"),
    ("qwen3", {"attention_bias": True}, "attention_bias=true: biases must be in all projections or in none"),
    ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights=1: must be true or false"),
    ("gpt2", {"activation_function": None}, "activation_function=null: must be a string"),
    ("gpt2", {"n_embd": 768, "hidden_size": 512}, "hidden_size=512: is an alias of n_embd, which is 768"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling=linear: must be an object or null"),
    ("llama", {"rope_parameters": []}, "rope_parameters=[]: must be an object or null"),
    ("llama", {"rope_theta": None}, "rope_theta=null: must be a number"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor=2: must be a number"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": True}}, "rope_scaling.factor=true: must be a number"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=null: rope_type=linear requires it"),
    ("llama", {"rope_scaling": {"type": ["linear"], "factor": 2.0}}, "rope_scaling.rope_type="),
    (
        "llama",
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_parameters.rope_type=longrope: this rotary scaling",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}},
        "rope_scaling.type=linear: rope_scaling.rope_type is llama3",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}},
        "rope_scaling.beta_fast=32: not used for rope_type=linear",
    ),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor=0.5"),
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.full_attention="),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        "rope_scaling.factor=2.0: rope_parameters.factor is 4.0; they must agree",
    ),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_scaling.rope_type=linear: rope_parameters.rope_type is default",
    ),
    ("llama", {"rope_theta": 1e4, "rope_scaling": {"rope_theta": 5e5}}, "rope_theta=10000.0: rope_scaling has 500000"),
    (
        "llama",
        {"rope_scaling": LLAMA3_SCALING, "original_max_position_embeddings": 32},
        "original_max_position_embeddings=32: rope_scaling has 16",
    ),
]


@pytest.mark.parametrize(("family", "change", "reason"), WRONG, ids=[reason for *_, reason in WRONG])
def test_wrong_types_and_contradictions_are_errors_that_name_the_key(
    family: str, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_hub_config(bare(family) | change, sequence_length=8)
    assert reason in str(raised.value)
    keys = [error.key for error in raised.value.violations]
    assert len(keys) == len(set(keys))


def test_rotary_keys_that_agree_in_both_places_are_read() -> None:
    parameters = LLAMA3_SCALING | {"rope_theta": 5e5}
    both = bare("llama", rope_theta=5e5, rope_scaling=LLAMA3_SCALING, rope_parameters=parameters)
    one = bare("llama", rope_parameters=parameters)
    assert read_hub_config(both).options == read_hub_config(one).options
    assert read_hub_config(one).options.rope.theta == 5e5
    omitted = {name: value for name, value in LLAMA3_SCALING.items() if name != "original_max_position_embeddings"}
    rope = read_hub_config(bare("llama", rope_scaling=omitted, max_position_embeddings=64)).options.rope
    assert (rope.theta, rope.original_max_positions) == (1e4, 64)


def test_aliases_of_keys_are_read() -> None:
    named = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
    model = read_hub_config(bare("gpt2", **named))
    assert (model.options.hidden, model.options.layers, model.options.heads, model.context) == (16, 2, 4, 32)
    assert model.unread == ()
    assert with_defaults(bare("gpt2", **named))["n_embd"] == 16


DROPPED = {
    "llama2": ("rope_theta", "tie_word_embeddings", "hidden_act", "num_key_value_heads"),
    "mistral": ("rope_theta", "tie_word_embeddings", "hidden_act"),
    "qwen3": ("tie_word_embeddings", "hidden_act", "rope_parameters"),
    "gpt2": ("n_inner", "activation_function", "layer_norm_epsilon"),
}


@pytest.mark.parametrize("family", DROPPED)
def test_the_proof_holds_for_a_file_that_omits_keys(family: str, tmp_path: Path) -> None:
    values = CONFIGS[family] | ({"layer_norm_epsilon": 1e-5} if family == "gpt2" else {})
    short = {name: value for name, value in values.items() if name not in DROPPED[family]}
    done = import_model(write(tmp_path / "x", short, tensors(values)), tmp_path / "in", proof="reference")
    assert done.proof is not None and done.proof.difference < 1e-10
    assert HubFolder(tmp_path / "x").config == short


def test_every_class_has_its_keys() -> None:
    assert KEYS.keys() == ARCHITECTURES.keys()
    assert read_hub_config(LLAMA).options.kv_groups == 2
