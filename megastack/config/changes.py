"""What changes between the run of a checkpoint and the run that resumes from it.

Compared are the keys that enter the mathematics: model, loss, optimizer, learning rate, precision, data. Where and on
what grid a run works, what it saves and what it reports may change freely. Seed, batch and data are refused elsewhere
(:mod:`megastack.data.resume`); what is found here is reported. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megastack.config.convert import to_plain
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
    "data.source",
    "data.paths",
    "data.tokenizer",
)
"""Sections and keys that leave the mathematics alone, or whose effect is compared by the samples that they give."""

WITH_EFFECT = ("run.on_nonfinite",)
"""Keys of those sections that do not."""

NULL_MEANS = {
    "lr.total_steps": "run.steps",
    "model.kv_groups": "model.heads",
    "model.max_positions": "batch.sequence_length",
}
"""The key whose value one has that is null."""

SHAPE_OF_THE_RATE = ("lr.total_steps", "lr.decay_steps", "lr.floor")
"""Keys that a constant learning rate does not read."""


@dataclass(frozen=True)
class Change:
    """A key and its two values, printed as ``key: old -> new``."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {spell(self.old)} -> {spell(self.new)}"


def changes(before: Mapping[str, Any], config: TrainConfig) -> list[Change]:
    """The keys with an effect on the mathematics whose values differ, in the order of the schema.

    Args:
        before: the configuration of the checkpoint's run as nested plain values; keys that it lacks have defaults.
        config: a legal configuration.
    """
    old, new = _flat(before), _flat(to_plain(config))
    unread = SHAPE_OF_THE_RATE if old["lr.schedule"] == new["lr.schedule"] == "constant" else ()
    names = [name for name in new if _has_effect(name) and name not in unread]
    return [Change(name, old[name], new[name]) for name in names if _content(old[name]) != _content(new[name])]


def _has_effect(name: str) -> bool:
    return name in WITH_EFFECT or not any(name == part or name.startswith(f"{part}.") for part in WITHOUT_EFFECT)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The value of every key of the schema."""
    found = {key.name: _at(values, key.name, to_plain(key.default)) for key in keys(TrainConfig) if not key.is_section}
    meant = {name: found[other] for name, other in NULL_MEANS.items() if found[name] is None}
    return found | meant


def _at(values: Any, name: str, default: Any) -> Any:
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return default
        values = values[part]
    return values


def _content(value: Any) -> Any:
    """A value without the places of files: those of a blend may have moved."""
    if isinstance(value, list):
        return [_content(item) for item in value]
    if isinstance(value, Mapping) and "weight" in value:
        return {name: item for name, item in value.items() if name not in ("paths", "source")}
    return value
