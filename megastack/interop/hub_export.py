"""Model options into the ``config.json`` of a Hugging Face class that computes the same, or the reasons why none does.

The file is written so that transformers 4 and 5 both understand it: rotary frequencies stand at the top and under
``rope_parameters``, the dtype under both of its names. ``rope_interleaved: false`` says that the rotation is
half-split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megastack.config.convert import to_plain
from megastack.config.phases import longest
from megastack.config.schema import ModelOptions, TrainConfig
from megastack.errors import ConfigError, Violation, spell
from megastack.interop.class_keys import KEYS, completed
from megastack.interop.hub_config import ARCHITECTURES, Architecture, read_hub_config
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
"""What a class can say of each option; options that are not named can have any value."""
OWN_LAYERS = ("attention", "mlp", "block")
WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Keys of the original ``config.json`` that the class keeps where it was the same model."""


def choose_architecture(model: ModelOptions, name: str | None = None) -> Architecture:
    """The class that expresses a model: the one that is named, or else the one that its features ask for.

    Raises:
        ConfigError: it cannot express some of the options; each with the reason.
    """
    if name is not None and name not in ARCHITECTURES:
        raise ConfigError.of([Violation("--architecture", name, "unknown architecture", tuple(ARCHITECTURES))])
    chosen = name or _natural(model)
    if errors := list(_inexpressible(model, chosen)):
        raise ConfigError.of(errors)
    return ARCHITECTURES[chosen]


def _natural(model: ModelOptions) -> str:
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
    for option in OWN_LAYERS:
        if getattr(model, option) is not None:
            yield Violation(f"model.{option}", getattr(model, option), "a layer of your own has no counterpart there")
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
    """The content of ``config.json``.

    Args:
        config: the run; its model and sequence length are read.
        architecture: a class that expresses the model.
        dtype: name of the weights' dtype, like ``bfloat16``.
        original: the file of the folder that the model came from. If it describes a model of this class and these
            sizes, the length of its context goes along, and its window if the run's sequences fit in it.
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
    carried = _carried(config, own | shared, original) if original else {}
    return shared | own | carried | dict(ids or {})


SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def _carried(config: TrainConfig, values: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """What the new file keeps of the old one, if both describe one model."""
    kept = {"use_cache": original["use_cache"]} if isinstance(original.get("use_cache"), bool) else {}
    if str(original.get("model_type")) not in KEYS or values["model_type"] == "gpt2":
        return kept
    before = completed(original)
    if any(before.get(key) != values[key] for key in SIZES):
        return kept
    try:
        model = read_hub_config(original, sequence_length=longest(config).batch.sequence_length)
    except ConfigError:  # a window that these sequences do not fit in
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
    """The options that differ from their defaults, for a YAML file of the group ``model``."""
    default = to_plain(ModelOptions(layers=0, heads=0, hidden=0, ffn=0, vocab=0))
    plain = to_plain(model)
    rope = {key: value for key, value in plain["rope"].items() if value != default["rope"][key]}
    values = {key: value for key, value in plain.items() if value != default[key] or key == "family"}
    return values | ({"rope": rope} if rope else {})
