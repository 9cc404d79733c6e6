"""A small legal configuration, built without YAML, and values to change in it."""

from __future__ import annotations

from typing import Any

from megastack.config.schema import BatchOptions, ModelOptions, RunOptions, TrainConfig

LEARNED = {"model.positions": "learned"}
BIN_37 = {"data.source": "bin", "data.paths": ["a"], "model.vocab": 37}
LLAMA3 = {"model.rope.scaling": "llama3", "model.rope.factor": 8.0}

Broken = tuple[dict[str, Any], int | None, str]
"""Values by key, the world size, and the line of the report that they must give."""


def a_config() -> TrainConfig:
    """Two layers of width 16, with the schema's defaults for all the rest."""
    return TrainConfig(
        run=RunOptions(steps=3),
        batch=BatchOptions(global_size=4, sequence_length=8),
        model=ModelOptions(layers=2, heads=4, hidden=16, ffn=32, vocab=256),
    )
