"""A small legal configuration, built without YAML."""

from __future__ import annotations

from megastack.config.schema import BatchOptions, ModelOptions, RunOptions, TrainConfig


def a_config() -> TrainConfig:
    """Two layers of width 16, with the schema's defaults for all the rest."""
    return TrainConfig(
        run=RunOptions(steps=3),
        batch=BatchOptions(global_size=4, sequence_length=8),
        model=ModelOptions(layers=2, heads=4, hidden=16, ffn=32, vocab=256),
    )
