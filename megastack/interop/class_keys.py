"""The keys of ``config.json`` by Hugging Face class: of which kind each is, its default, and whether it may be null.

A key that a file leaves out has the default of its class, as transformers 5 defines it. Null is something else: it
means "none" where the class allows it (no sliding window, a head of hidden / heads), and is an error elsewhere. A test
compares every line with the classes themselves where transformers is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["size", "count", "number", "flag", "text", "texts", "mapping", "id", "ids"]
"""What a value has to be; :data:`WORDS` says it."""


@dataclass(frozen=True)
class Key:
    """One key of a class.

    Args:
        kind: of its values.
        default: where the key is absent.
        nullable: whether null is a value of its own.
    """

    kind: Kind
    default: Any
    nullable: bool = False


def _keys(kind: Kind, nullable: bool = False, /, **defaults: Any) -> dict[str, Key]:
    return {name: Key(kind, default, nullable) for name, default in defaults.items()}


_SHARED = {
    **_keys("id", True, pad_token_id=None),
    **_keys("number", initializer_range=0.02),
    **_keys("flag", tie_word_embeddings=False, use_cache=True),
}
_ROTARY = {
    **_SHARED,
    **_keys("size", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32),
    **_keys("text", hidden_act="silu"),
    **_keys("number", rms_norm_eps=1e-6, attention_dropout=0.0, rope_theta=1e4),
    **_keys("number", True, partial_rotary_factor=None),
    **_keys("mapping", True, rope_parameters=None, rope_scaling=None),
    **_keys("size", True, head_dim=None),
}
_QWEN = {
    **_ROTARY,
    **_keys("size", vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768),
    **_keys("size", True, num_key_value_heads=32, sliding_window=4096),
    **_keys("flag", use_sliding_window=False),
    **_keys("count", max_window_layers=28),
    **_keys("texts", True, layer_types=None),
    **_keys("id", True, bos_token_id=None),
    **_keys("ids", True, eos_token_id=None),
}
KEYS: Mapping[str, Mapping[str, Key]] = {
    "llama": {
        **_ROTARY,
        **_keys("size", vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048),
        **_keys("size", True, num_key_value_heads=None),
        **_keys("number", True, attention_dropout=0.0),
        **_keys("flag", attention_bias=False, mlp_bias=False),
        **_keys("id", True, bos_token_id=1),
        **_keys("ids", True, eos_token_id=2),
    },
    "mistral": {
        **_ROTARY,
        **_keys("size", vocab_size=32000, intermediate_size=14336, max_position_embeddings=131072),
        **_keys("size", num_key_value_heads=8),
        **_keys("size", True, sliding_window=4096),
        **_keys("id", True, bos_token_id=1),
        **_keys("ids", True, eos_token_id=2),
    },
    "qwen2": _QWEN,
    "qwen3": {
        **_QWEN,
        **_keys("size", head_dim=128),
        **_keys("flag", attention_bias=False),
    },
    "gpt2": {
        **_SHARED,
        **_keys("size", vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
        **_keys("size", True, n_inner=None),
        **_keys("text", activation_function="gelu_new"),
        **_keys("number", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, layer_norm_epsilon=1e-5),
        **_keys("flag", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
        **_keys("flag", reorder_and_upcast_attn=False, add_cross_attention=False, tie_word_embeddings=True),
        **_keys("id", True, bos_token_id=50256),
        **_keys("ids", True, eos_token_id=50256),
    },
}
"""By ``model_type``. Rotary keys are where files of transformers 4 and 5 have them."""
OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
}
"""Other names that a class accepts for its keys, by ``model_type``."""


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a ``config.json`` with the defaults of its class where keys are absent."""
    kind = values["model_type"]
    renamed = {OTHER_NAMES.get(kind, {}).get(name, name): value for name, value in values.items()}
    return {name: key.default for name, key in KEYS[kind].items()} | renamed


def is_of_kind(value: Any, kind: Kind) -> bool:
    """Whether a value other than null is what a key asks for; JSON tells true from 1."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "size":
            return whole and value >= 1
        case "count":
            return whole and value >= 0
        case "number":
            return whole or isinstance(value, float)
        case "flag":
            return isinstance(value, bool)
        case "text":
            return isinstance(value, str)
        case "texts":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "mapping":
            return isinstance(value, dict)
        case "id":
            return whole and value >= -1
        case "ids":
            return is_of_kind(value, "id") or (
                isinstance(value, list) and bool(value) and all(is_of_kind(each, "id") for each in value)
            )


WORDS: Mapping[Kind, str] = {
    "size": "a positive whole number",
    "count": "a whole number of at least 0",
    "number": "a number",
    "flag": "true or false",
    "text": "a string",
    "texts": "a list of strings",
    "mapping": "an object",
    "id": "a token id",
    "ids": "a token id or a list of them",
}
"""A kind in words."""
