"""Which part of which Hugging Face tensor each weight of the decoder is, and the reverse; no tensor is touched here.

A weight of the decoder is made of one or more **pieces**, each a range of output rows of a stored matrix. Query and
output weights are one piece; keys and values ``(G, 2, K, D)`` are two pieces stacked at dim 1; gate and up
``(2, F, D)`` two stacked at dim 0. GPT-2 keeps matrices as ``(in, out)`` and queries, keys and values in one; its
pieces are ranges of columns of the stored matrix. Rotary pairs are half-split on both sides, so rows keep their order.

Shapes: D hidden, F ffn, G kv groups, K head dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from megastack.config.schema import TrainConfig
from megastack.interop.hub_config import Architecture
from megastack.models.profile import stage_placements

Parts = tuple[tuple[str, int], ...]
"""Stored tensors that make a weight, each with the number of the part that is meant where several share one."""

LLAMA: Mapping[str, Parts] = {
    "embedding": (("model.embed_tokens", 0),),
    "norm": (("model.norm", 0),),
    "head": (("lm_head", 0),),
    "attention_norm": (("input_layernorm", 0),),
    "attention.q": (("self_attn.q_proj", 0),),
    "attention.kv": (("self_attn.k_proj", 0), ("self_attn.v_proj", 0)),
    "attention.q_norm": (("self_attn.q_norm", 0),),
    "attention.k_norm": (("self_attn.k_norm", 0),),
    "attention.out": (("self_attn.o_proj", 0),),
    "mlp_norm": (("post_attention_layernorm", 0),),
    "mlp.up": (("mlp.gate_proj", 0), ("mlp.up_proj", 0)),
    "mlp.down": (("mlp.down_proj", 0),),
}
GPT2: Mapping[str, Parts] = {
    "embedding": (("transformer.wte", 0),),
    "positions": (("transformer.wpe", 0),),
    "norm": (("transformer.ln_f", 0),),
    "head": (("lm_head", 0),),
    "attention_norm": (("ln_1", 0),),
    "attention.q": (("attn.c_attn", 0),),
    "attention.kv": (("attn.c_attn", 1), ("attn.c_attn", 2)),
    "attention.out": (("attn.c_proj", 0),),
    "mlp_norm": (("ln_2", 0),),
    "mlp.up": (("mlp.c_fc", 0),),
    "mlp.down": (("mlp.c_proj", 0),),
}
STACKED = {"attention.kv": 1, "mlp.up": 0}
"""The dim along which the pieces of a weight are stacked, where there are two."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` of a stored tensor, counted by output feature; columns where it is ``transposed``."""

    source: str
    start: int
    stop: int
    transposed: bool = False


@dataclass(frozen=True)
class Weight:
    """A weight of the decoder and the pieces that it is made of.

    Attributes:
        name: its global name.
        shape: its logical global shape.
        pieces: the pieces, in order along ``stacked``.
        stacked: the dim of ``shape`` that counts the pieces; None where the weight is one piece.
        matrix: whether the last dim is the input features (else every dim is output features).
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stacked: int | None
    matrix: bool

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of one piece."""
        return self.shape if self.stacked is None else self.shape[: self.stacked] + self.shape[self.stacked + 1 :]

    @property
    def columns(self) -> int | None:
        """Input features; None for a vector."""
        return self.shape[-1] if self.matrix else None


def weights_of(config: TrainConfig, architecture: Architecture) -> dict[str, Weight]:
    """Every weight of the model by global name; a tied head has none of its own."""
    layers = range(config.model.layers)
    placements = stage_placements(config, layers, embedding=True, head=True)
    table = GPT2 if architecture.name == "gpt2" else LLAMA
    return {name: _weight(name, tuple(p.shape), table) for name, p in placements.items()}


def _weight(name: str, shape: tuple[int, ...], table: Mapping[str, Parts]) -> Weight:
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
        prefix = f"transformer.h.{layer}." if table is GPT2 else f"model.layers.{layer}."
    parts = table[module]
    stacked = STACKED[module] if len(parts) > 1 else None
    piece = shape if stacked is None else shape[:stacked] + shape[stacked + 1 :]
    matrix = kind == "weight" and "norm" not in module
    transposed = matrix and table is GPT2 and bool(prefix)
    rows = prod(piece[:-1]) if matrix else prod(piece)
    pieces = tuple(Piece(f"{prefix}{s}.{kind}", n * rows, (n + 1) * rows, transposed) for s, n in parts)
    return Weight(name, shape, pieces, stacked, matrix)


@dataclass(frozen=True)
class Source:
    """A stored tensor: its shape, and which piece of which weight each range of its rows is, in order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Weight, int], ...]

    @property
    def transposed(self) -> bool:
        """Whether it is stored as (in, out)."""
        weight, number = self.parts[0]
        return weight.pieces[number].transposed


def sources_of(weights: Mapping[str, Weight]) -> dict[str, Source]:
    """The stored tensors that the weights are made of, by name, each once."""
    parts: dict[str, list[tuple[Weight, int]]] = defaultdict(list)
    for weight in weights.values():
        for number, piece in enumerate(weight.pieces):
            parts[piece.source].append((weight, number))
    return {name: _source(name, sorted(found, key=_start)) for name, found in parts.items()}


def _start(part: tuple[Weight, int]) -> int:
    weight, number = part
    return weight.pieces[number].start


def _source(name: str, parts: list[tuple[Weight, int]]) -> Source:
    weight, number = parts[-1]
    rows, columns = weight.pieces[number].stop, weight.columns
    shape = (rows,) if columns is None else (columns, rows) if weight.pieces[number].transposed else (rows, columns)
    return Source(name, shape, tuple(parts))
