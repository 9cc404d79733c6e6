"""The model, data, layouts and choices of the parity tests.

Every case is a change of one small configuration, which is composed once. Its text is read once.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from megastack.assemble.data import read_dataset
from megastack.config.compose import compose
from megastack.config.convert import replace_values, value_of
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from tests.parity.cover import Row, all_rows

Changes = Mapping[str, Any]

SMALL = {
    "model.hidden": 16,
    "model.heads": 4,
    "model.kv_groups": 4,
    "model.ffn": 24,
    "model.vocab": 259,
    "model.vocab_multiple": 8,  # padded to 264
    "batch.global_size": 8,
    "batch.micro_size": 2,
    "batch.sequence_length": 8,
    "optim.lr": 0.01,
}

LAYOUTS: dict[str, Changes] = {
    "dp2": {"parallel.dp": 2},
    "dp4": {"parallel.dp": 4},
    "tp2": {"parallel.tp": 2},
    "tp4": {"parallel.tp": 4},
    "pp2": {"parallel.pp": 2},
    "pp4": {"parallel.pp": 4},
    "dp2.tp2": {"parallel.dp": 2, "parallel.tp": 2},
    "tp2.pp2": {"parallel.tp": 2, "parallel.pp": 2},
    "dp2.pp2": {"parallel.dp": 2, "parallel.pp": 2},
    "dp2.tp2.pp2": {"parallel.dp": 2, "parallel.tp": 2, "parallel.pp": 2},
    "pp2x2": {"parallel.pp": 2, "schedule.name": "interleaved", "schedule.chunks": 2},
    "pp4x2": {"parallel.pp": 4, "schedule.name": "interleaved", "schedule.chunks": 2},
    "pp4.zb_h1": {"parallel.pp": 4, "schedule.name": "zb_h1"},
    "dp2.tp2.pp2.zb_h2": {"parallel.dp": 2, "parallel.tp": 2, "parallel.pp": 2, "schedule.name": "zb_h2"},
}

FAMILIES: dict[str, Changes] = {
    "llama": {},
    "gpt2": {
        "model.family": "gpt2",
        "model.norm": "layer",
        "model.activation": "gelu",
        "model.positions": "learned",
        "model.bias": True,
    },
}

ZERO: dict[str, Changes] = {
    "0": {},
    "1": {"parallel.zero.stage": 1},
    "2": {"parallel.zero.stage": 2},
    "3": {"parallel.zero.stage": 3, "parallel.zero.gather": "microbatch", "parallel.zero.reduce": "microbatch"},
}

CHOICES = {
    "layout": tuple(LAYOUTS),
    "family": tuple(FAMILIES),
    "sequence_parallel": ("true", "false"),
    "tied": ("true", "false"),
    "kv_groups": ("4", "1"),
    "optimizer": ("sgd", "adamw"),
    "recompute": ("none", "full"),
    "zero": tuple(ZERO),
}


def rows() -> list[Row]:
    """Every combination of choices; ZeRO levels 2 and 3 only with several data ranks and unsplit backwards."""
    splits = {"schedule.name": "zb_h2"}.items()
    sharded = {name for name, it in LAYOUTS.items() if "parallel.dp" in it and not splits <= it.items()}
    return [row for row in all_rows(CHOICES) if row["layout"] in sharded or int(row["zero"]) < 2]


def model_of(row: Mapping[str, str]) -> Changes:
    """The changes that a row shares with its reference; 8 layers for the layout with 8 stages."""
    return FAMILIES[row["family"]] | {
        "model.layers": 8 if row["layout"] == "pp4x2" else 4,
        "model.kv_groups": int(row["kv_groups"]),
        "model.tied": row["tied"] == "true",
        "model.dropout": 0.1,
        "optim.name": row["optimizer"],
    }


def layout_of(row: Mapping[str, str]) -> Changes:
    """The changes that differ from the reference."""
    return (
        LAYOUTS[row["layout"]]
        | ZERO[row["zero"]]
        | {"parallel.sequence_parallel": row["sequence_parallel"] == "true", "recompute.mode": row["recompute"]}
    )


@cache
def _small() -> TrainConfig:
    return replace_values(compose(["experiment=parity"]), SMALL)


def configured(*changes: Changes) -> TrainConfig:
    """The small configuration with changes by dotted key; later changes take precedence; asserts that it is valid."""
    config = _small()
    for key, value in (pair for change in changes for pair in change.items()):
        current = value_of(config, key)
        config = replace_values(config, {key: type(current)(value) if isinstance(current, StrEnum) else value})
    found = violations(config)
    assert not found, "\n".join(map(str, found))
    return config


@cache
def dataset(sequence_length: int = 8) -> Dataset:
    """Packed documents of a few words, identical in every session."""
    draw = random.Random(7)
    words = ["rank", "stage", "tensor", "the", "of", "pipeline", "sum", "a", "gradient", "layout", "and", "is"]
    documents = [" ".join(draw.choice(words) for _ in range(draw.randint(1, 12))) for _ in range(150)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        data = {"data.source": "jsonl", "data.paths": [str(path)]}
        return read_dataset(configured(data, {"batch.sequence_length": sequence_length}))
