"""Differences between the configuration of a checkpoint and the configuration of the run that resumes from it.

Only keys that affect the computed values are compared: model, loss, optimizer, learning rate, precision, data. The
folder, the parallel layout, checkpoints and records may change freely. Differences found here are reported;
:mod:`megastack.data.resume` rejects changes of seed, batch and data. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megastack.config.convert import to_plain, with_current_names
from megastack.config.fields import keys
from megastack.config.schema import TrainConfig
from megastack.errors import spell

WITHOUT_EFFECT = (
    "run",
    "launch",
    "parallel",
    "schedule",
    "recompute",
    "checkpoint",
    "observe",
    "cluster",
    "device",
    "resume",
    "compile",
    "batch.micro_size",
    "model.family",
    "loss.chunked",
    "data.source",
    "data.paths",
    "data.tokenizer",
)
"""Sections and keys that do not affect the computed values, or are compared through their samples instead."""

WITH_EFFECT = ("run.on_nonfinite",)
"""Exceptions: keys in these sections that affect the computed values."""

NULL_MEANS = {
    "lr.total_steps": "run.steps",
    "model.kv_groups": "model.heads",
    "model.max_positions": "batch.sequence_length",
}
"""The key whose value replaces a null."""

DECAY_KEYS = ("lr.total_steps", "lr.decay_steps", "lr.floor")
"""Keys without effect on a constant learning rate."""


@dataclass(frozen=True)
class Change:
    """A key with two values, printed as ``key: old -> new``."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {spell(self.old)} -> {spell(self.new)}"


def changes(before: Mapping[str, object], config: TrainConfig) -> list[Change]:
    """Return the keys that affect the computed values and differ, in schema order.

    Args:
        before: the configuration of the checkpoint's run as nested plain values; missing keys have their defaults.
        config: a valid configuration.
    """
    old, new = _flat(with_current_names(before)[0]), _flat(to_plain(config))
    unused = DECAY_KEYS if old["lr.schedule"] == new["lr.schedule"] == "constant" else ()
    names = [name for name in new if _has_effect(name) and name not in unused]
    return [Change(name, old[name], new[name]) for name in names if _content(old[name]) != _content(new[name])]


def _has_effect(name: str) -> bool:
    return name in WITH_EFFECT or not any(name == part or name.startswith(f"{part}.") for part in WITHOUT_EFFECT)


def _flat(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the value of every schema key."""
    found = {key.name: _at(values, key.name, to_plain(key.default)) for key in keys(TrainConfig) if not key.is_section}
    return found | {name: found[other] for name, other in NULL_MEANS.items() if found[name] is None}


def _at(values: object, name: str, default: object) -> Any:
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return default
        values = values[part]
    return values


def _content(value: object) -> object:
    """Return a value without the paths and source of blend entries, because files may have moved."""
    if isinstance(value, list):
        return [_content(item) for item in value]
    if isinstance(value, Mapping) and "weight" in value:
        return {name: item for name, item in value.items() if name not in ("paths", "source")}
    return value
