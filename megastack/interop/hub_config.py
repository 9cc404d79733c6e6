"""Convert the ``config.json`` of a Hugging Face folder to model options that compute the same function.

Files of transformers 4 (``rope_theta`` and ``rope_scaling`` at the top level) and 5 (``rope_parameters``) are
supported; a file may have all three keys if they agree. An absent key has the default of the file's class. Features
that the decoder does not support are errors, all in one report: other rotary scalings, a sliding window shorter than
the sequences, biases in only some projections, an exact GELU. These families rotate half-split pairs, as the decoder
does; a file that sets ``rope_interleaved`` is rejected.

Weights are mapped in :mod:`megastack.interop.weight_map`; the reverse direction is :mod:`megastack.interop.hub_export`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megastack.config.choices import Activation, Family, Norm, Positions, RopeScaling
from megastack.config.schema import ModelOptions, RopeOptions
from megastack.errors import ConfigError, Violation
from megastack.interop.config_keys import Fields, HubKey, key


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face model class that the decoder can represent.

    Args:
        name: its ``model_type``.
        class_name: its class, as in ``architectures``.
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
ROPE_TYPES = ("default", "linear", "llama3")
OLD, NEW = "rope_scaling", "rope_parameters"
ORIGINAL = "original_max_position_embeddings"
_FACTOR, _LENGTH = key("number"), key("size")
ROPE_KEYS: Mapping[str, Mapping[str, tuple[str, HubKey]]] = {
    "default": {},
    "linear": {"factor": ("factor", _FACTOR)},
    "llama3": {
        "factor": ("factor", _FACTOR),
        "low_freq_factor": ("low_freq_factor", _FACTOR),
        "high_freq_factor": ("high_freq_factor", _FACTOR),
        ORIGINAL: ("original_max_positions", _LENGTH),
    },
}
"""The keys that each kind of scaling requires, with the corresponding option and its kind."""
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class HubModel:
    """The model that a ``config.json`` describes.

    Attributes:
        architecture: the model class.
        options: options of the decoder that computes the same function.
        context: the context length in the file.
        unread: keys that were not read and might matter.
        window: the sliding window in tokens, if it is shorter than the context.
    """

    architecture: Architecture
    options: ModelOptions
    context: int
    unread: tuple[str, ...]
    window: int | None = None


def read_hub_config(values: Mapping[str, Any], *, sequence_length: int | None = None) -> HubModel:
    """Read the model that the values of a ``config.json`` describe.

    Args:
        values: the parsed file.
        sequence_length: the longest sequence the model will be used with; None for the longest that the file allows.

    Raises:
        ConfigError: the decoder does not support the model; the message names every unsupported key.
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
    fields.must("hidden_act", ("silu", "swish"), "the gated MLP uses SiLU")
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
        rope=_read_rope(fields),
        qk_norm=architecture.name == "qwen3",
        tied=fields.get("tie_word_embeddings"),
        attention_dropout=fields.get("attention_dropout") or 0.0,
        init_std=fields.get("initializer_range"),
        **_biases(fields, architecture),
    )


def _biases(fields: Fields, architecture: Architecture) -> dict[str, bool]:
    """Return bias options from the keys that the class has; other classes fix them."""
    if architecture.name == "qwen2":
        return {"qkv_bias": True}
    if architecture.name == "mistral":
        return {"bias": False}
    attention = fields.get("attention_bias")
    mlp = architecture.name == "llama" and fields.get("mlp_bias")
    if attention != mlp:
        with_mlp = f"with mlp_bias={str(mlp).lower()}: " if architecture.name == "llama" else ""
        rule = "biases must be in all projections or in none (in q, k and v only: qwen2)"
        fields.error("attention_bias", attention, with_mlp + rule)
    return {"bias": attention and mlp}


def _window(fields: Fields, architecture: Architecture, layers: int) -> int | None:
    """Return the sliding window of any layer, in tokens; None if every layer has full attention."""
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
        fields.error("layer_types", unknown, "this kind of attention is not supported", ("full_attention",))
    elif len(kinds) != layers:
        fields.error("layer_types", kinds, f"must name one kind for each of num_hidden_layers={layers}")
    elif "sliding_attention" in kinds and window is None:
        rule = "sliding_attention needs use_sliding_window=true and a sliding_window"
        fields.error("layer_types", kinds, rule, ("full_attention",))
    return window if "sliding_attention" in kinds else None


def _require_wide(fields: Fields, window: int | None, length: int) -> None:
    """Reject a sliding window that is shorter than the sequences; a longer window does not change the results."""
    if window is not None and window < length:
        absent = "" if fields.has("sliding_window") else ", the class's default,"
        rule = f"attention covers the whole sequence{absent} and sequences have up to {length} tokens"
        fields.error("sliding_window", window, rule, (f"--sequence-length {window} or less",))


def _gpt2(fields: Fields) -> ModelOptions:
    hidden = fields.get("n_embd")
    fields.must("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "GELU is the tanh approximation")
    fields.must("scale_attn_weights", (True,), "scores are divided by √head_dim")
    fields.must("scale_attn_by_inverse_layer_idx", (False,), "scores do not depend on the layer")
    fields.must("add_cross_attention", (False,), "the decoder has no cross-attention")
    fields.must("reorder_and_upcast_attn", (False,), "scores have the precision of the activations")
    rates = {fields.get(name) for name in ("embd_pdrop", "resid_pdrop")}
    if len(rates) > 1:
        fields.error("embd_pdrop", fields.get("embd_pdrop"), "embeddings and sub-layers share one rate", ())
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


def _read_rope(fields: Fields) -> RopeOptions:
    """Read the rotary options of a file; unsupported values are recorded as errors."""
    theta = fields.get("rope_theta")
    read = [found for name in (NEW, OLD) if (found := _read_rope_object(fields, name, theta)) is not None]
    if not read:
        return RopeOptions(theta=theta)
    _compare_ropes(fields, theta, read)
    rope, options = read[0]
    return options or RopeOptions(theta=rope["rope_theta"])


_Rope = tuple[dict[str, Any], RopeOptions | None]
"""The values of an object with defaults, and the options that they map to; None if there are errors."""


def _read_rope_object(fields: Fields, name: str, theta: float) -> _Rope | None:
    values: dict[str, Any] = dict(fields.get(name) or {})
    if not values:
        return None
    before = len(fields.errors)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": _rope_type(fields, name, values)}
    if "rope_theta" in values:
        rope["rope_theta"] = fields.checked(f"{name}.rope_theta", values["rope_theta"], key("number", theta))
    used = ROPE_KEYS.get(rope["rope_type"])
    if used is None:
        fields.error(f"{name}.rope_type", rope["rope_type"], "this rotary scaling is not supported", ROPE_TYPES)
        return rope, None
    options: dict[str, Any] = {}
    for theirs, (ours, wanted) in used.items():
        value = values.get(theirs, _original(fields, theirs))
        if value is None:
            fields.error(f"{name}.{theirs}", None, f"rope_type={rope['rope_type']} requires it")
        else:
            rope[theirs] = options[ours] = fields.checked(f"{name}.{theirs}", value, wanted)
    _reject_unread(fields, name, values, rope)
    if len(fields.errors) > before:
        return rope, None
    scaling = RopeScaling.none if rope["rope_type"] == "default" else RopeScaling(rope["rope_type"])
    return rope, RopeOptions(theta=rope["rope_theta"], scaling=scaling, **options)


def _rope_type(fields: Fields, name: str, values: Mapping[str, Any]) -> str:
    """Return ``rope_type``, or the value of its older name ``type``."""
    kinds = [values[each] for each in ("rope_type", "type") if values.get(each) is not None]
    if len({str(kind) for kind in kinds}) > 1:
        fields.error(f"{name}.type", kinds[1], f"{name}.rope_type is {kinds[0]}", (kinds[0],))
    return str(kinds[0]) if kinds else "default"


def _original(fields: Fields, name: str) -> Any:
    """Return the original context length for an object that lacks it: the top-level key, or else the context."""
    if name != ORIGINAL:
        return None
    return fields.values.get(ORIGINAL, fields.get("max_position_embeddings"))


def _reject_unread(fields: Fields, name: str, values: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    for other, value in values.items():
        where = f"{name}.{other}"
        if other in LAYER_TYPES:
            fields.error(where, value, "all layers share one rotation")
        elif other == "partial_rotary_factor":
            if value is not None and (isinstance(value, bool) or value != 1):
                fields.error(where, value, "the whole head is rotated", (1.0, None))
        elif other not in rope and other != "type" and value is not None:
            fields.error(where, value, f"not used for rope_type={rope['rope_type']}; remove it")


def _compare_ropes(fields: Fields, theta: float, read: list[_Rope]) -> None:
    """Record an error where the rotary keys of a file disagree."""
    first = read[0][0]
    where = NEW if fields.get(NEW) else OLD
    if ORIGINAL in first:
        fields.absent(ORIGINAL, (first[ORIGINAL],), f"{where} has {first[ORIGINAL]}")
    if fields.has("rope_theta") and theta != first["rope_theta"]:
        fields.error("rope_theta", theta, f"{where} has {first['rope_theta']}", (first["rope_theta"],))
    for other, _ in read[1:]:
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                rule = f"{NEW}.{name} is {first.get(name)}; they must agree"
                fields.error(f"{OLD}.{name}", other.get(name), rule)
