"""Small configurations and microbatches that the model tests share."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

from megastack.batch import Microbatch
from megastack.config.schema import BatchOptions, LossOptions, ModelOptions, ParallelOptions, RunOptions, TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.models.decoder import Decoder
from megastack.placement.module import initialise_

SEQUENCE = 8

LLAMA: dict[str, Any] = {
    "layers": 2,
    "heads": 4,
    "hidden": 16,
    "ffn": 32,
    "vocab": 37,
    "kv_groups": 2,
    "vocab_multiple": 8,
    "init_std": 0.2,
}
GPT2: dict[str, Any] = LLAMA | {
    "family": "gpt2",
    "kv_groups": None,
    "norm": "layer",
    "activation": "gelu",
    "positions": "learned",
    "bias": True,
    "tied": True,
}
QWEN: dict[str, Any] = LLAMA | {"qk_norm": True, "qkv_bias": True, "head_dim": 6}


def tiny(model: dict[str, Any], *, tp: int = 1, sequence_parallel: bool = True, **loss: float) -> TrainConfig:
    """A configuration of a model small enough to check by hand."""
    return TrainConfig(
        seed=3,
        run=RunOptions(steps=1),
        batch=BatchOptions(global_size=2, sequence_length=SEQUENCE),
        model=ModelOptions(**_enums(model)),
        parallel=ParallelOptions(tp=tp, sequence_parallel=sequence_parallel),
        loss=LossOptions(**loss),
    )


def _enums(model: dict[str, Any]) -> dict[str, Any]:
    """Plain strings to the members that the schema's fields hold by default."""
    kinds = {name: type(value) for name, value in vars(ModelOptions(**LLAMA)).items() if isinstance(value, StrEnum)}
    return {name: kinds[name](value) if name in kinds else value for name, value in model.items()}


def microbatch(*, documents: bool = False, vocab: int = 37, seed: int = 0) -> Microbatch:
    """Two sequences with an ignored label; with ``documents`` each packs two, of 5 and 3 tokens in the first."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, vocab, (2, 2, SEQUENCE), generator=generator)
    labels[1, 3] = -100
    positions = torch.arange(SEQUENCE).repeat(2, 1)
    numbers = None
    if documents:
        numbers = torch.tensor([[0] * 5 + [1] * 3, [4] * 2 + [7] * 6])
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
    return Microbatch(tokens, labels, positions, numbers, samples_B=torch.tensor([11, 12]), step=5)


def build(config: TrainConfig, mesh: Mesh, **slice_: Any) -> Decoder:
    """An fp64 decoder with its initial values, built as a run builds it: on meta first."""
    with torch.device("meta"):
        decoder = Decoder(config, mesh, **slice_)
    initialise_(decoder, mesh, config.seed, dtype=torch.float64)
    return decoder
