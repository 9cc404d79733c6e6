"""Reading ``config.json`` key by key: what a key says, what it must say, and which keys nobody looked at.

An absent key has the default of its class (:mod:`megastack.interop.class_keys`); null is a value of its own, or an
error. Every fault is collected, so that a folder is refused once and for all its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastack.errors import Violation
from megastack.interop.class_keys import KEYS, OTHER_NAMES, WORDS, Key, Kind, is_of_kind

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
"""Keys that say nothing about what the model computes, or are read only where they do."""
MISSING: Any = object()


class Fields:
    """The values of a ``config.json`` with the faults found while reading them.

    Args:
        values: the parsed file.
        model_type: the class, whose keys may be asked for.
    """

    def __init__(self, values: Mapping[str, Any], model_type: str) -> None:
        self.values = dict(values)
        self.errors: list[Violation] = []
        self._keys = KEYS[model_type]
        self._seen: set[str] = set()
        for other, name in OTHER_NAMES.get(model_type, {}).items():
            self._take_other(other, name)

    def get(self, name: str) -> Any:
        """The value of a key, of its kind; the default of the class where it is absent, None where null is legal."""
        key = self._keys[name]
        self._seen.add(name)
        value = self.values.get(name, MISSING)
        if value is MISSING:
            return key.default
        return self.checked(name, value, key)

    def has(self, name: str) -> bool:
        """Whether the file has a key."""
        return name in self.values

    def checked(self, name: str, value: Any, key: Key) -> Any:
        """A value if it is what a key asks for, else its default and a fault."""
        if value is None:
            if not key.nullable:
                self.error(name, value, f"must be {WORDS[key.kind]}; where it is absent, it is the class's default")
            return None if key.nullable else key.default
        if not is_of_kind(value, key.kind):
            self.error(name, value, f"must be {WORDS[key.kind]}{' or null' if key.nullable else ''}")
            return key.default
        return float(value) if key.kind == "number" else value

    def must(self, name: str, legal: tuple[Any, ...], rule: str) -> None:
        """Note a fault unless a key has one of the legal values; None is legal where the class allows null."""
        before, value = len(self.errors), self.get(name)
        if len(self.errors) == before and value is not None and value not in legal:
            self.error(name, value, rule, legal)

    def absent(self, name: str, legal: tuple[Any, ...], rule: str) -> None:
        """Note a fault unless a key of no class is absent, null or one of the legal values."""
        self._seen.add(name)
        value = self.values.get(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in legal):
            self.error(name, value, rule, (*legal, None))

    def error(self, name: str, value: Any, rule: str, legal: tuple[Any, ...] = ()) -> None:
        """Note that a key cannot be taken as it is; once, however often it is read."""
        found = Violation(name, value, rule, legal)
        if found not in self.errors:
            self.errors.append(found)

    def unread(self) -> tuple[str, ...]:
        """The keys that nobody asked for and that are not known to be harmless."""
        return tuple(sorted(set(self.values) - self._seen - HARMLESS))

    def _take_other(self, other: str, name: str) -> None:
        """Read a key under another name of it."""
        if other not in self.values:
            return
        self._seen.add(other)
        value = self.values[other]
        if name in self.values and self.values[name] != value:
            self.error(other, value, f"another name of {name}, which is {self.values[name]}")
        self.values.setdefault(name, value)


def key(kind: Kind, default: Any = None, *, nullable: bool = False) -> Key:
    """A key of no class, of an object inside the file."""
    return Key(kind, default, nullable)
