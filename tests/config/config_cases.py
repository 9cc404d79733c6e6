"""A small valid configuration, built without YAML, and changes to it."""

from __future__ import annotations

from typing import Any

from megastack.config.schema import BatchOptions, ModelOptions, RunOptions, TrainConfig

LEARNED = {"model.positions": "learned"}
BIN_37 = {"data.source": "bin", "data.paths": ["a"], "model.vocab": 37}
LLAMA3 = {"model.rope.scaling": "llama3", "model.rope.factor": 8.0}

InvalidCase = tuple[dict[str, Any], int | None, str]
"""Values by key, the world size, and the expected line of the report."""


def a_config() -> TrainConfig:
    """Two layers of width 16, otherwise with the schema's defaults."""
    return TrainConfig(
        run=RunOptions(steps=3),
        batch=BatchOptions(global_size=4, sequence_length=8),
        model=ModelOptions(layers=2, heads=4, hidden=16, ffn=32, vocab=256),
    )
