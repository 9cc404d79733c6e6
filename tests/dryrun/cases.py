"""Small configurations for dry runs: each schedule, ZeRO level, precision and recompute mode at least once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from tests.parity.cases import FAMILIES, LAYOUTS, ZERO, Changes, configured

ADAMW: Changes = {"optim.name": "adamw"}


def small(*changes: Changes, microbatches: int | None = None) -> TrainConfig:
    """A model of one block per stage, with few microbatches of one sample."""
    merged: dict[str, Any] = {key: value for change in changes for key, value in change.items()}
    dp, pp, chunks = (merged.get(key, 1) for key in ("parallel.dp", "parallel.pp", "schedule.chunks"))
    count = microbatches or max(1, pp)
    sizes = {"batch.micro_size": 1, "batch.global_size": dp * count, "model.layers": pp * chunks}
    return configured(sizes | merged)


def precision(compute: str, **more: Any) -> Changes:
    """The changes for a precision."""
    return {"precision.compute": compute} | {key.replace("__", "."): value for key, value in more.items()}


CASES: Mapping[str, tuple[int, TrainConfig]] = {
    "bf16.recompute_full.dropout": (
        0,
        small(
            precision("bf16"),
            {"recompute.mode": "full", "model.dropout": 0.1, "model.attention_dropout": 0.1},
            ADAMW,
        ),
    ),
    "tp2.pp2.fp16.tied": (3, small(LAYOUTS["tp2.pp2"], precision("fp16"), {"model.tied": True}, ADAMW)),
    "dp2.interleaved.zero1": (1, small({"parallel.dp": 2}, LAYOUTS["pp2x2"], ZERO["1"], precision("bf16"), ADAMW)),
    "zb_h1.fp64": (1, small({"parallel.pp": 3, "schedule.name": "zb_h1"}, precision("fp64"))),
    "dp2.zero2.bf16": (0, small(LAYOUTS["dp2"], ZERO["2"], precision("bf16"), ADAMW)),
    "dp2.tp2.zero3.gpt2": (3, small(LAYOUTS["dp2.tp2"], ZERO["3"], precision("fp32"), FAMILIES["gpt2"])),
    "gpipe.selective.qk_norm": (
        0,
        small(LAYOUTS["pp2"], {"schedule.name": "gpipe", "recompute.mode": "selective", "model.qk_norm": True}),
    ),
}
"""By name, the rank that is run and the configuration."""


def world(config: TrainConfig) -> range:
    """All ranks of a configuration."""
    return range(mesh_shape(config).world_size)
