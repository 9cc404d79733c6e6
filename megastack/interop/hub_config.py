"""``config.json`` of a Hugging Face folder into the model options that compute the same.

Files of transformers 4 (``rope_theta`` and ``rope_scaling`` at the top) and 5 (``rope_parameters``) are read alike. A
feature that the decoder does not have is refused, with every other reason, in one report: another rotary scaling, a
sliding window that the sequence would feel, biases in some projections only, an exact GELU. The rotary convention of
these families is half-split, which is the decoder's; a file that claims another (``rope_interleaved``) is refused.

Not here: weights (:mod:`megastack.interop.names`) and the way back (:mod:`megastack.interop.hub_export`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megastack.config.choices import Activation, Family, Norm, Positions, RopeScaling
from megastack.config.schema import ModelOptions, RopeOptions
from megastack.errors import ConfigError, Violation
from megastack.interop.fields import Fields


@dataclass(frozen=True)
class Architecture:
    """A model of the Hugging Face library that the decoder can be.

    Args:
        name: its ``model_type``.
        class_name: what ``architectures`` says.
        kv_groups: ``num_key_value_heads`` where the key is absent; None for one per head.
        head_dim: ``head_dim`` where the key is absent; None for hidden / heads.
    """

    name: str
    class_name: str
    kv_groups: int | None = None
    head_dim: int | None = None


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture("llama", "LlamaForCausalLM"),
        Architecture("mistral", "MistralForCausalLM", kv_groups=8),
        Architecture("qwen2", "Qwen2ForCausalLM", kv_groups=32),
        Architecture("qwen3", "Qwen3ForCausalLM", kv_groups=32, head_dim=128),
        Architecture("gpt2", "GPT2LMHeadModel"),
    )
}
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class HubModel:
    """What a ``config.json`` describes.

    Attributes:
        architecture: the model class.
        options: the decoder that computes the same.
        context: the longest sequence that the file speaks of.
        unread: keys that were not looked at and might matter.
    """

    architecture: Architecture
    options: ModelOptions
    context: int
    unread: tuple[str, ...]


def read_hub_config(values: Mapping[str, Any], *, sequence_length: int | None = None) -> HubModel:
    """The model that the values of a ``config.json`` describe.

    Args:
        values: the parsed file.
        sequence_length: the longest sequence it will be used with; None is the longest the file allows.

    Raises:
        ConfigError: naming every key that the decoder cannot follow.
    """
    architecture = _architecture(values)
    fields = Fields(values)
    fields.must("quantization_config", (None,), "quantised weights cannot be read; use the original weights")
    if architecture.name == "gpt2":
        options, context = _gpt2(fields), fields.required("n_positions")
    else:
        context = fields.size("max_position_embeddings", 2048) or 2048
        options = _llama_like(fields, architecture)
        _check_window(fields, architecture, options.layers, sequence_length or context)
    if fields.faults:
        raise ConfigError.of(fields.faults)
    return HubModel(architecture, options, context, fields.unread())


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
    heads, hidden = fields.required("num_attention_heads"), fields.required("hidden_size")
    groups = fields.size("num_key_value_heads", architecture.kv_groups or heads) or heads
    if architecture.name == "qwen2" or "head_dim" in fields.values:
        width = fields.get("head_dim")
    else:
        width = architecture.head_dim
    fields.must("hidden_act", ("silu", "swish"), "the gated MLP has SiLU")
    fields.must("partial_rotary_factor", (1.0,), "the whole head is rotated")
    fields.must("rope_interleaved", (False,), "the rotation pairs component i with i + head_dim/2 (half-split)")
    return ModelOptions(
        family=Family.llama,
        layers=fields.required("num_hidden_layers"),
        heads=heads,
        hidden=hidden,
        ffn=fields.required("intermediate_size"),
        vocab=fields.required("vocab_size"),
        kv_groups=None if groups == heads else groups,
        head_dim=None if width in (None, hidden / heads) else width,
        norm=Norm.rms,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=Activation.swiglu,
        positions=Positions.rope,
        rope=_rope(fields),
        qk_norm=architecture.name == "qwen3",
        tied=fields.flag("tie_word_embeddings", False),
        attention_dropout=fields.number("attention_dropout", 0.0),
        init_std=fields.number("initializer_range", 0.02),
        **_biases(fields, architecture),
    )


def _biases(fields: Fields, architecture: Architecture) -> dict[str, bool]:
    if architecture.name == "qwen2":
        return {"qkv_bias": True}
    attention, mlp = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    if attention != mlp:
        rule = "biases are in all projections or in none (of q, k and v alone: qwen2)"
        fields.fault("attention_bias", attention, f"with mlp_bias={str(mlp).lower()}: {rule}")
    return {"bias": attention and mlp}


def _rope(fields: Fields) -> RopeOptions:
    old, new = fields.get("rope_scaling") or {}, fields.get("rope_parameters") or {}
    new = new.get("full_attention", new)
    given = new or old
    theta = given.get("rope_theta", fields.number("rope_theta", 1e4))
    if "rope_theta" in fields.values and theta != fields.values["rope_theta"]:
        fields.fault("rope_theta", fields.values["rope_theta"], f"rope_parameters says {theta}", (theta,))
    kinds = [each.get("rope_type", each.get("type", "default")) for each in (new, old) if each]
    kind = kinds[0] if kinds else "default"
    if len(set(kinds)) > 1:
        fields.fault("rope_scaling", kinds[1], f"rope_parameters says {kind}", (kind,))
    if kind not in ROPE_KINDS:
        fields.fault("rope_type", kind, "this scaling of the rotary frequencies is not built", ROPE_KINDS)
        return RopeOptions()
    scaling = RopeScaling.none if kind == "default" else RopeScaling(kind)
    options: dict[str, Any] = {"theta": float(theta), "scaling": scaling}
    names = {"factor": "factor"} if kind != "default" else {}
    if kind == "llama3":
        names |= {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
        names |= {"original_max_positions": "original_max_position_embeddings"}
    for ours, theirs in names.items():
        if given.get(theirs) is None:
            fields.fault(f"rope_scaling.{theirs}", None, f"rope_type={kind} needs it")
        else:
            options[ours] = given[theirs] if ours == "original_max_positions" else float(given[theirs])
    return RopeOptions(**options)


def _check_window(fields: Fields, architecture: Architecture, layers: int, length: int) -> None:
    """Refuse windowed attention where a sequence is longer than the window; a shorter one is computed alike."""
    window, kinds = fields.get("sliding_window"), fields.get("layer_types")
    if architecture.name.startswith("qwen"):
        first = fields.get("max_window_layers", 28)
        windowed = fields.flag("use_sliding_window", False) and (first is None or first < layers)
    else:
        windowed = architecture.name == "mistral"
    if kinds is not None:
        windowed = windowed and "sliding_attention" in kinds
        if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
            fields.fault("layer_types", unknown, "attention of this kind is not built", ("full_attention",))
    if windowed and window is not None and window < length:
        rule = f"attention here sees a whole sequence, and sequences are up to {length} tokens"
        fields.fault("sliding_window", window, rule, (f"--sequence-length {window} or less",))


def _gpt2(fields: Fields) -> ModelOptions:
    hidden = fields.required("n_embd")
    fields.must("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "GELU is the tanh approximation")
    fields.must("scale_attn_weights", (True,), "scores are divided by √head_dim")
    fields.must("scale_attn_by_inverse_layer_idx", (False,), "scores do not depend on the layer")
    fields.must("add_cross_attention", (False,), "a decoder without cross-attention is built")
    fields.must("reorder_and_upcast_attn", (False,), "scores have the precision of the activations")
    rates = {fields.number(name, 0.1) for name in ("embd_pdrop", "resid_pdrop")}
    if len(rates) > 1:
        fields.fault("embd_pdrop", fields.values.get("embd_pdrop"), "one rate serves embeddings and sub-layers", ())
    return ModelOptions(
        family=Family.gpt2,
        layers=fields.required("n_layer"),
        heads=fields.required("n_head"),
        hidden=hidden,
        ffn=fields.size("n_inner", 4 * hidden) or 4 * hidden,
        vocab=fields.required("vocab_size"),
        norm=Norm.layer,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=Activation.gelu,
        positions=Positions.learned,
        max_positions=fields.required("n_positions"),
        bias=True,
        tied=fields.flag("tie_word_embeddings", True),
        dropout=max(rates),
        attention_dropout=fields.number("attn_pdrop", 0.1),
        init_std=fields.number("initializer_range", 0.02),
    )
