"""Reading ``config.json`` key by key: what a key says, what it must say, and which keys nobody looked at.

Hugging Face distinguishes a key that is absent (the class's default holds) from one that is null (there is no such
thing), and so does this. Every fault is collected, so that a folder is refused once and for all its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastack.errors import Violation

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


class Fields:
    """The values of a ``config.json`` with the faults found while reading them.

    Args:
        values: the parsed file.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.faults: list[Violation] = []
        self._seen: set[str] = set()

    def get(self, name: str, absent: Any = None) -> Any:
        """The value as it stands, ``absent`` where the key is not there."""
        self._seen.add(name)
        return self.values.get(name, absent)

    def size(self, name: str, absent: int | None = None) -> int | None:
        """A positive whole number, or None where it is null; a key without ``absent`` has to be there."""
        value = self.get(name, absent)
        if value is None and name in self.values:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.fault(name, value, "must be a positive whole number")
            return 1
        return value

    def required(self, name: str) -> int:
        """A positive whole number that has to be there."""
        value = self.size(name)
        if value is None:
            self.fault(name, None, "must be a positive whole number")
        return value or 1

    def number(self, name: str, absent: float) -> float:
        """A number; null counts as absent."""
        value = self.get(name, absent)
        value = absent if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fault(name, value, "must be a number")
            return absent
        return float(value)

    def flag(self, name: str, absent: bool) -> bool:
        """True or false; null counts as absent."""
        value = self.get(name, absent)
        value = absent if value is None else value
        if not isinstance(value, bool):
            self.fault(name, value, "must be true or false")
            return absent
        return value

    def must(self, name: str, legal: tuple[Any, ...], rule: str) -> None:
        """Note a fault unless the key has one of the legal values; a key that is absent or null has the first."""
        value = self.get(name)
        if value is not None and value not in legal:
            self.fault(name, value, rule, legal)

    def fault(self, name: str, value: Any, rule: str, legal: tuple[Any, ...] = ()) -> None:
        """Note that a key cannot be taken as it is."""
        self.faults.append(Violation(name, value, rule, legal))

    def unread(self) -> tuple[str, ...]:
        """The keys that nobody asked for and that are not known to be harmless."""
        return tuple(sorted(set(self.values) - self._seen - HARMLESS))
