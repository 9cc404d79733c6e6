"""Convert model options to the ``config.json`` of a Hugging Face class that computes the same function.

The file supports transformers 4 and 5: rotary frequencies are written at the top level and in ``rope_parameters``, the
dtype under both of its names. ``rope_interleaved: false`` states that the rotation is half-split. Options that the
class cannot express are errors.

Token ids come from the original model, the tokenizer's files, or the run's tokenizer. A key that ``config.json`` omits
has the default of its class (2 is Llama's end-of-sequence id) regardless of the tokenizer. The ids of the beginning and
end of a sequence are therefore always written, as null if there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megastack.config.convert import to_plain
from megastack.config.phases import longest
from megastack.config.schema import ModelOptions, TrainConfig
from megastack.data.tokenizer_file import END_NAMES
from megastack.data.tokenizers import ByteTokenizer
from megastack.errors import ConfigError, Violation, spell
from megastack.interop.config_keys import KEYS, WORDS, is_of_kind, with_defaults
from megastack.interop.hub_config import ARCHITECTURES, Architecture, read_hub_config
from megastack.interop.json_file import read_json
from megastack.models.config import ModelConfig
from megastack.models.specs import attention_sizes

LLAMA_LIKE = {"norm": ("rms",), "activation": ("swiglu",), "positions": ("rope",)}
EXPRESSES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "llama": LLAMA_LIKE | {"qk_norm": (False,)},
    "mistral": LLAMA_LIKE | {"qk_norm": (False,), "bias": (False,), "qkv_bias": (False,)},
    "qwen2": LLAMA_LIKE | {"qk_norm": (False,), "bias": (False,), "qkv_bias": (True,)},
    "qwen3": LLAMA_LIKE | {"qk_norm": (True,), "bias": (False,), "qkv_bias": (False,)},
    "gpt2": {
        "norm": ("layer",),
        "activation": ("gelu",),
        "positions": ("learned",),
        "qk_norm": (False,),
        "bias": (True,),
    },
}
"""The values that a class supports for each option; options that are not listed can have any value."""
CUSTOM_LAYERS = ("attention", "mlp", "block")
WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Sliding-window keys that are kept from the original ``config.json`` of the same model."""
ALWAYS_WRITTEN = ("bos_token_id", "eos_token_id")
TOKEN_ID_KEYS = (*ALWAYS_WRITTEN, "pad_token_id", "unk_token_id")
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
VOCABULARY = "vocab.json"


def choose_architecture(model: ModelOptions, name: str | None = None) -> Architecture:
    """Choose the class to export a model as: ``name``, or otherwise the class that its features imply.

    Raises:
        ConfigError: the class cannot express the model; the message lists each such option with the reason.
    """
    if name is not None and name not in ARCHITECTURES:
        raise ConfigError.of([Violation("--architecture", name, "unknown architecture", tuple(ARCHITECTURES))])
    chosen = name or _implied(model)
    if errors := list(_inexpressible(model, chosen)):
        raise ConfigError.of(errors)
    return ARCHITECTURES[chosen]


def _implied(model: ModelOptions) -> str:
    if model.positions == "learned" or model.norm == "layer" or model.activation == "gelu":
        return "gpt2"
    if model.qk_norm:
        return "qwen3"
    return "qwen2" if model.qkv_bias and not model.bias else "llama"


def _inexpressible(model: ModelOptions, name: str) -> Iterator[Violation]:
    cannot = f"{ARCHITECTURES[name].class_name} cannot express it"
    for option, legal in EXPRESSES[name].items():
        value = getattr(model, option)
        if value not in legal:
            yield Violation(f"model.{option}", value, cannot, legal)
    for option in CUSTOM_LAYERS:
        if getattr(model, option) is not None:
            yield Violation(
                f"model.{option}", getattr(model, option), "custom layers have no counterpart in Hugging Face classes"
            )
    if name == "llama" and model.qkv_bias and not model.bias:
        yield Violation("model.qkv_bias", True, cannot, ("--architecture qwen2",))
    if name == "gpt2" and attention_sizes(model).groups != model.heads:
        yield Violation("model.kv_groups", model.kv_groups, cannot, (model.heads,))
    if name == "gpt2" and attention_sizes(model).width * model.heads != model.hidden:
        yield Violation("model.head_dim", model.head_dim, cannot, (model.hidden // model.heads,))
    if name == "gpt2" and model.qkv_bias and not model.bias:
        yield Violation("model.qkv_bias", True, cannot, (False,))


def hub_config(
    config: TrainConfig,
    architecture: Architecture,
    dtype: str,
    original: Mapping[str, Any] | None = None,
    ids: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the content of ``config.json``.

    Args:
        config: the configuration of the run, whose model and sequence length are read.
        architecture: a class that can express the model.
        dtype: name of the weights' dtype, such as ``bfloat16``.
        original: ``config.json`` of the folder that the model was imported from. If it describes a model of this class
            and these sizes, its context length is kept; its sliding window is kept if the run's sequences fit in it.
        ids: token ids by key.
    """
    own = _gpt2(config) if architecture.name == "gpt2" else _llama_like(config, architecture)
    shared = {
        "architectures": [architecture.class_name],
        "model_type": architecture.name,
        "vocab_size": config.model.vocab,
        "tie_word_embeddings": config.model.tied,
        "initializer_range": config.model.init_std,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    kept = _kept(config, own | shared, original) if original else {}
    return shared | own | kept | dict(ids or {})


SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def _kept(config: TrainConfig, values: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the new file keeps from the original one, if both describe the same model."""
    kept = {"use_cache": original["use_cache"]} if isinstance(original.get("use_cache"), bool) else {}
    if str(original.get("model_type")) not in KEYS or values["model_type"] == "gpt2":
        return kept
    before = with_defaults(original)
    if any(before.get(key) != values[key] for key in SIZES):
        return kept
    try:
        model = read_hub_config(original, sequence_length=longest(config).batch.sequence_length)
    except ConfigError:  # a window shorter than these sequences
        return kept
    kept["max_position_embeddings"] = max(model.context, longest(config).batch.sequence_length)
    if model.window is not None:
        kept |= {key: before[key] for key in WINDOW if before.get(key) is not None}
    return kept


def _llama_like(config: TrainConfig, architecture: Architecture) -> dict[str, Any]:
    model = config.model
    values: dict[str, Any] = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": attention_sizes(model).groups,
        "head_dim": attention_sizes(model).width,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": longest(config).batch.sequence_length,
        "attention_dropout": model.attention_dropout,
        **_rope(model),
    }
    if architecture.name == "llama":
        values |= {"attention_bias": model.bias, "mlp_bias": model.bias}
    if architecture.name == "qwen3":
        values |= {"attention_bias": False}
    if architecture.name != "llama":
        values |= {"sliding_window": None}
    if architecture.name.startswith("qwen"):
        values |= {"use_sliding_window": False}
    return values


def _rope(model: ModelOptions) -> dict[str, Any]:
    rope = model.rope
    kind = "default" if rope.scaling == "none" else spell(rope.scaling)
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind != "default":
        scaling["factor"] = rope.factor
    if kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling |= {"original_max_position_embeddings": rope.original_max_positions}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta} | scaling,
        "rope_interleaved": False,
    }


def _gpt2(config: TrainConfig) -> dict[str, Any]:
    model = config.model
    return {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": None if model.ffn == 4 * model.hidden else model.ffn,
        "n_positions": ModelConfig.of(config).max_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
    }


def model_values(model: ModelOptions) -> dict[str, Any]:
    """Return the options that differ from their defaults, for a YAML file of the ``model`` group."""
    default = to_plain(ModelOptions(layers=0, heads=0, hidden=0, ffn=0, vocab=0))
    plain = to_plain(model)
    rope = {key: value for key, value in plain["rope"].items() if value != default["rope"][key]}
    values = {key: value for key, value in plain.items() if value != default[key] or key == "family"}
    return values | ({"rope": rope} if rope else {})


def byte_ids(vocab: int) -> dict[str, Any]:
    """Return the token ids of the byte tokenizer that are within the vocabulary."""
    end = ByteTokenizer.end
    return {"bos_token_id": None, "eos_token_id": end if end is not None and end < vocab else None}


def token_ids(
    files: Mapping[str, Path], original: Mapping[str, Any] | None = None, *, vocab: int | None = None
) -> dict[str, Any]:
    """Return token ids by key of ``config.json``; always includes the beginning and the end of a sequence.

    Args:
        files: the tokenizer's files by their name in a folder.
        original: ``config.json`` of the folder that the model was imported from, which takes precedence over the
            tokenizer; if neither has an id, the default of its class is used.
        vocab: the size of the vocabulary, which bounds the default ids.

    Raises:
        ConfigError: a value of the original is not a token id, or a token of the settings is not in the vocabulary.
    """
    original = original or {}
    _require_ids(original)
    names, ids = _names(files), _ids(files)
    found = {key: original[key] for key in TOKEN_ID_KEYS if key in original}
    for key in ALWAYS_WRITTEN:
        if key in found:
            continue
        name = names.get(key.removesuffix("_id"))
        if name is not None:
            found[key] = _id(name, key, ids)
        elif key == "eos_token_id" and any(each in ids for each in END_NAMES):
            found[key] = next(ids[each] for each in END_NAMES if each in ids)
        else:
            found[key] = None if ids else _default(original, key, vocab)
    return found


def _default(original: Mapping[str, Any], key: str, vocab: int | None) -> int | None:
    """Return the default of the original's class for an absent key, if it is within the vocabulary."""
    known = KEYS.get(str(original.get("model_type")))
    value = known[key].default if known else None
    return value if value is not None and vocab is not None and value < vocab else None


def generation_config(ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``generation_config.json``, which overrides ``config.json``; empty without ids."""
    given = {key: ids[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if ids.get(key) is not None}
    return given | {"_from_model_config": True} if given else {}


def _require_ids(original: Mapping[str, Any]) -> None:
    keys = {key: KEYS["llama"][key].kind if key in KEYS["llama"] else "id" for key in TOKEN_ID_KEYS}
    errors = [
        Violation(key, original[key], f"must be {WORDS[kind]} or null")
        for key, kind in keys.items()
        if original.get(key) is not None and not is_of_kind(original[key], kind)
    ]
    if errors:
        raise ConfigError.of(errors)


def _names(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the text of each special token, by key (``eos_token`` and so on)."""
    names: dict[str, str] = {}
    for file in (SPECIAL_TOKENS, TOKENIZER_CONFIG):
        values = read_json(files[file]) if file in files else {}
        for key, value in values.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
    return names


def _ids(files: Mapping[str, Path]) -> dict[str, int]:
    """Return the id of each token of the vocabulary."""
    ids: dict[str, Any] = {}
    if VOCABULARY in files:
        ids |= read_json(files[VOCABULARY])
    if TOKENIZER in files:
        values = read_json(files[TOKENIZER])
        model = values.get("model")
        words = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(words, dict):
            ids |= words
        elif isinstance(words, list):  # unigram models list (token, score)
            ids |= {word[0]: at for at, word in enumerate(words) if isinstance(word, list) and word}
        added = values.get("added_tokens")
        for each in added if isinstance(added, list) else []:
            if isinstance(each, dict) and isinstance(each.get("content"), str):
                ids[each["content"]] = each.get("id")
    return {name: each for name, each in ids.items() if is_of_kind(each, "id")}


def _id(name: str, key: str, ids: Mapping[str, int]) -> int | None:
    """Return the id of a token; None if the folder has no vocabulary to look it up in (only a sentencepiece model)."""
    if ids and name not in ids:
        rule = f"{key.removesuffix('_id')} in the tokenizer's settings, but not in its vocabulary"
        raise ConfigError.of([Violation("token", name, rule)])
    return ids.get(name)
