"""``config.json`` of a Hugging Face folder into the model options that compute the same.

Files of transformers 4 (``rope_theta`` and ``rope_scaling`` at the top) and 5 (``rope_parameters``) are both read, and
an absent key has the default of the file's class. A feature that the decoder does not have is refused, with every other
reason, in one report: another rotary scaling, a sliding window that the sequence would feel, biases in some projections
only, an exact GELU. The rotary convention of these families is half-split, which is the decoder's; a file that claims
another (``rope_interleaved``) is refused.

Not here: weights (:mod:`megastack.interop.names`) and the way back (:mod:`megastack.interop.hub_export`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megastack.config.choices import Activation, Family, Norm, Positions
from megastack.config.schema import ModelOptions
from megastack.errors import ConfigError, Violation
from megastack.interop.fields import Fields
from megastack.interop.rope_keys import read_rope


@dataclass(frozen=True)
class Architecture:
    """A model of the Hugging Face library that the decoder can be.

    Args:
        name: its ``model_type``.
        class_name: what ``architectures`` says.
    """

    name: str
    class_name: str


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", "LlamaForCausalLM"),
        Architecture("mistral", "MistralForCausalLM"),
        Architecture("qwen2", "Qwen2ForCausalLM"),
        Architecture("qwen3", "Qwen3ForCausalLM"),
        Architecture("gpt2", "GPT2LMHeadModel"),
    )
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class HubModel:
    """What a ``config.json`` describes.

    Attributes:
        architecture: the model class.
        options: the decoder that computes the same.
        context: the longest sequence that the file speaks of.
        unread: keys that were not looked at and might matter.
        window: how many tokens the class attends to, where that is less than its whole context.
    """

    architecture: Architecture
    options: ModelOptions
    context: int
    unread: tuple[str, ...]
    window: int | None = None


def read_hub_config(values: Mapping[str, Any], *, sequence_length: int | None = None) -> HubModel:
    """The model that the values of a ``config.json`` describe.

    Args:
        values: the parsed file.
        sequence_length: the longest sequence it will be used with; None is the longest the file allows.

    Raises:
        ConfigError: naming every key that the decoder cannot follow.
    """
    architecture = _architecture(values)
    fields = Fields(values, architecture.name)
    fields.absent("quantization_config", (), "quantised weights cannot be read; use the original weights")
    for name in TOKEN_IDS:
        fields.get(name)
    window = None
    if architecture.name == "gpt2":
        options, context = _gpt2(fields), fields.get("n_positions")
    else:
        context = fields.get("max_position_embeddings")
        options = _llama_like(fields, architecture)
        window = _window(fields, architecture, options.layers)
        _require_wide(fields, window, sequence_length or context)
    if fields.errors:
        raise ConfigError.of(fields.errors)
    narrow = window if window is not None and window < context else None
    return HubModel(architecture, options, context, fields.unread(), narrow)


def _architecture(values: Mapping[str, Any]) -> Architecture:
    named = values.get("architectures") or []
    kind = values.get("model_type")
    found = ARCHITECTURES.get(str(kind))
    known = tuple(f"{each.name} ({each.class_name})" for each in ARCHITECTURES.values())
    if found is None:
        raise ConfigError.of([Violation("model_type", kind, "unknown architecture", known)])
    if named and named != [found.class_name]:
        rule = f"must be {found.class_name} for model_type={found.name}"
        raise ConfigError.of([Violation("architectures", named, rule, known)])
    return found


def _llama_like(fields: Fields, architecture: Architecture) -> ModelOptions:
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    groups, width = fields.get("num_key_value_heads") or heads, fields.get("head_dim")
    fields.must("hidden_act", ("silu", "swish"), "the gated MLP has SiLU")
    fields.must("partial_rotary_factor", (1.0,), "the whole head is rotated")
    fields.absent("rope_interleaved", (False,), "the rotation pairs component i with i + head_dim/2 (half-split)")
    return ModelOptions(
        family=Family.llama,
        layers=fields.get("num_hidden_layers"),
        heads=heads,
        hidden=hidden,
        ffn=fields.get("intermediate_size"),
        vocab=fields.get("vocab_size"),
        kv_groups=None if groups == heads else groups,
        head_dim=None if width in (None, hidden / heads) else width,
        norm=Norm.rms,
        norm_eps=fields.get("rms_norm_eps"),
        activation=Activation.swiglu,
        positions=Positions.rope,
        rope=read_rope(fields),
        qk_norm=architecture.name == "qwen3",
        tied=fields.get("tie_word_embeddings"),
        attention_dropout=fields.get("attention_dropout") or 0.0,
        init_std=fields.get("initializer_range"),
        **_biases(fields, architecture),
    )


def _biases(fields: Fields, architecture: Architecture) -> dict[str, bool]:
    """Of keys that the class has; elsewhere the weights tell."""
    if architecture.name == "qwen2":
        return {"qkv_bias": True}
    if architecture.name == "mistral":
        return {"bias": False}
    attention = fields.get("attention_bias")
    mlp = architecture.name == "llama" and fields.get("mlp_bias")
    if attention != mlp:
        with_mlp = f"with mlp_bias={str(mlp).lower()}: " if architecture.name == "llama" else ""
        rule = "biases are in all projections or in none (of q, k and v alone: qwen2)"
        fields.error("attention_bias", attention, with_mlp + rule)
    return {"bias": attention and mlp}


def _window(fields: Fields, architecture: Architecture, layers: int) -> int | None:
    """How many tokens some layer of the class attends to; None if each layer attends to all."""
    if architecture.name == "llama":
        return None
    window: int | None = fields.get("sliding_window")
    if architecture.name == "mistral":
        return window
    window = window if fields.get("use_sliding_window") else None
    kinds, first = fields.get("layer_types"), fields.get("max_window_layers")
    if kinds is None:
        return window if first < layers else None
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        fields.error("layer_types", unknown, "attention of this kind is not built", ("full_attention",))
    elif len(kinds) != layers:
        fields.error("layer_types", kinds, f"must name one kind for each of num_hidden_layers={layers}")
    elif "sliding_attention" in kinds and window is None:
        rule = "sliding_attention needs use_sliding_window=true and a sliding_window"
        fields.error("layer_types", kinds, rule, ("full_attention",))
    return window if "sliding_attention" in kinds else None


def _require_wide(fields: Fields, window: int | None, length: int) -> None:
    """Refuse windowed attention where a sequence is longer than the window; a shorter one is computed alike."""
    if window is not None and window < length:
        absent = "" if fields.has("sliding_window") else ", the class's default,"
        rule = f"attention here sees a whole sequence{absent} and sequences are up to {length} tokens"
        fields.error("sliding_window", window, rule, (f"--sequence-length {window} or less",))


def _gpt2(fields: Fields) -> ModelOptions:
    hidden = fields.get("n_embd")
    fields.must("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "GELU is the tanh approximation")
    fields.must("scale_attn_weights", (True,), "scores are divided by √head_dim")
    fields.must("scale_attn_by_inverse_layer_idx", (False,), "scores do not depend on the layer")
    fields.must("add_cross_attention", (False,), "a decoder without cross-attention is built")
    fields.must("reorder_and_upcast_attn", (False,), "scores have the precision of the activations")
    rates = {fields.get(name) for name in ("embd_pdrop", "resid_pdrop")}
    if len(rates) > 1:
        fields.error("embd_pdrop", fields.get("embd_pdrop"), "one rate serves embeddings and sub-layers", ())
    return ModelOptions(
        family=Family.gpt2,
        layers=fields.get("n_layer"),
        heads=fields.get("n_head"),
        hidden=hidden,
        ffn=fields.get("n_inner") or 4 * hidden,
        vocab=fields.get("vocab_size"),
        norm=Norm.layer,
        norm_eps=fields.get("layer_norm_epsilon"),
        activation=Activation.gelu,
        positions=Positions.learned,
        max_positions=fields.get("n_positions"),
        bias=True,
        tied=fields.get("tie_word_embeddings"),
        dropout=max(rates),
        attention_dropout=fields.get("attn_pdrop"),
        init_std=fields.get("initializer_range"),
    )
