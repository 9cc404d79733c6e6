"""The keys of ``config.json`` by Hugging Face class, and a reader that checks values against them.

For each key, a table contains the kind of its values, its default, and whether null is allowed. A key that a file omits
has the default of its class, as defined by transformers 5. Null is a value: it means "none" if the class allows it (no
sliding window, heads of width hidden / heads), and is an error otherwise. A test compares every entry with the classes
themselves if transformers is installed. :class:`Fields` collects all errors of a file into one report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megastack.errors import Violation

ValueKind = Literal["size", "count", "number", "flag", "text", "texts", "mapping", "id", "ids"]
"""Kind of a value; :data:`WORDS` describes it."""


@dataclass(frozen=True)
class HubKey:
    """One key of a class.

    Args:
        kind: the kind of its values.
        default: the value if the key is absent.
        nullable: whether null is allowed.
    """

    kind: ValueKind
    default: Any
    nullable: bool = False


def _keys(kind: ValueKind, nullable: bool = False, /, **defaults: Any) -> dict[str, HubKey]:
    return {name: HubKey(kind, default, nullable) for name, default in defaults.items()}


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
KEYS: Mapping[str, Mapping[str, HubKey]] = {
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
"""Keys by ``model_type``. Rotary keys include the names of both transformers 4 and 5."""
ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
}
"""Aliases that a class accepts for its keys, by ``model_type``."""


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``config.json``, with the defaults of its class for absent keys."""
    kind = values["model_type"]
    renamed = {ALIASES.get(kind, {}).get(name, name): value for name, value in values.items()}
    return {name: key.default for name, key in KEYS[kind].items()} | renamed


def is_of_kind(value: Any, kind: ValueKind) -> bool:
    """Whether a value other than null has the given kind; true is not a number."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "size":
            return integer and value >= 1
        case "count":
            return integer and value >= 0
        case "number":
            return integer or isinstance(value, float)
        case "flag":
            return isinstance(value, bool)
        case "text":
            return isinstance(value, str)
        case "texts":
            return isinstance(value, list) and all(isinstance(each, str) for each in value)
        case "mapping":
            return isinstance(value, dict)
        case "id":
            return integer and value >= -1
        case "ids":
            return is_of_kind(value, "id") or (
                isinstance(value, list) and bool(value) and all(is_of_kind(each, "id") for each in value)
            )


WORDS: Mapping[ValueKind, str] = {
    "size": "a positive integer",
    "count": "an integer of at least 0",
    "number": "a number",
    "flag": "true or false",
    "text": "a string",
    "texts": "a list of strings",
    "mapping": "an object",
    "id": "a token id",
    "ids": "a token id or a list of them",
}
"""Each kind in words, for error messages."""

HARMLESS = frozenset(
    {
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id"),
        *("task_specific_params", "n_ctx", "pretraining_tp", "is_llama_config", "id2label", "label2id", "auto_map"),
        *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "problem_type"),
        *("summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("max_window_layers", "use_sliding_window", "sliding_window", "transformers.js_config"),
    }
)
"""Keys that do not affect the model's output, or are read when they do."""
_MISSING: Any = object()


class Fields:
    """The values of a ``config.json``, and the errors found while reading them.

    Args:
        values: the parsed file.
        model_type: the model class, which determines the keys that may be read.
    """

    def __init__(self, values: Mapping[str, Any], model_type: str) -> None:
        self.values = dict(values)
        self.errors: list[Violation] = []
        self._keys = KEYS[model_type]
        self._seen: set[str] = set()
        for other, name in ALIASES.get(model_type, {}).items():
            self._read_alias(other, name)

    def get(self, name: str) -> Any:
        """Return the value of a key, checked against its kind; the default of the class if the key is absent."""
        key = self._keys[name]
        self._seen.add(name)
        value = self.values.get(name, _MISSING)
        if value is _MISSING:
            return key.default
        return self.checked(name, value, key)

    def has(self, name: str) -> bool:
        """Whether the file has a key."""
        return name in self.values

    def checked(self, name: str, value: Any, key: HubKey) -> Any:
        """Return the value if it has the key's kind; otherwise record an error and return the default."""
        if value is None:
            if not key.nullable:
                self.error(name, value, f"must be {WORDS[key.kind]}; remove it to use the class's default")
            return None if key.nullable else key.default
        if not is_of_kind(value, key.kind):
            self.error(name, value, f"must be {WORDS[key.kind]}{' or null' if key.nullable else ''}")
            return key.default
        return float(value) if key.kind == "number" else value

    def must(self, name: str, legal: tuple[Any, ...], rule: str) -> None:
        """Record an error unless a key has one of the valid values; null is valid if the class allows it."""
        before, value = len(self.errors), self.get(name)
        if len(self.errors) == before and value is not None and value not in legal:
            self.error(name, value, rule, legal)

    def absent(self, name: str, legal: tuple[Any, ...], rule: str) -> None:
        """Record an error unless a key that no class defines is absent, null or one of the valid values."""
        self._seen.add(name)
        value = self.values.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in legal):
            self.error(name, value, rule, (*legal, None))

    def error(self, name: str, value: Any, rule: str, legal: tuple[Any, ...] = ()) -> None:
        """Record an error of a key, only once even if the key is read several times."""
        found = Violation(name, value, rule, legal)
        if found not in self.errors:
            self.errors.append(found)

    def unread(self) -> tuple[str, ...]:
        """Return the keys that were not read and are not known to be harmless."""
        return tuple(sorted(set(self.values) - self._seen - HARMLESS))

    def _read_alias(self, other: str, name: str) -> None:
        """Read a key by its alias."""
        if other not in self.values:
            return
        self._seen.add(other)
        value = self.values[other]
        if name in self.values and self.values[name] != value:
            self.error(other, value, f"is an alias of {name}, which is {self.values[name]}")
        self.values.setdefault(name, value)


def key(kind: ValueKind, default: Any = None, *, nullable: bool = False) -> HubKey:
    """Define a key of an object inside the file, which belongs to no class."""
    return HubKey(kind, default, nullable)
