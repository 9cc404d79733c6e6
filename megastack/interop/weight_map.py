"""Mapping between the decoder's weights and parts of Hugging Face tensors, in both directions; touches no tensor.

A weight of the decoder consists of one or more **pieces**, each a range of output rows of a stored matrix. Query and
output weights are one piece. Keys and values ``(G, 2, K, D)`` are two pieces stacked along dim 1; gate and up
``(2, F, D)`` are two pieces stacked along dim 0. GPT-2 stores matrices as ``(in, out)``, and queries, keys and values
in one matrix; its pieces are ranges of columns of the stored matrix. Both implementations rotate half-split pairs, so
the order of rows is the same.

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

_Slices = tuple[tuple[str, int], ...]
"""The stored tensors that make up a weight; the number is the index of the slice if weights share a tensor."""

LLAMA: Mapping[str, _Slices] = {
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
GPT2: Mapping[str, _Slices] = {
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
"""The dim along which the two pieces of a weight are stacked, if it has two."""


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` (output features) of a stored tensor; columns if it is ``transposed``."""

    source: str
    start: int
    stop: int
    transposed: bool = False


@dataclass(frozen=True)
class Weight:
    """A weight of the decoder and its pieces.

    Attributes:
        name: its global name.
        shape: its logical global shape.
        pieces: the pieces, in order along ``stacked``.
        stacked: the dim of ``shape`` along which the pieces are stacked; None if there is a single piece.
        matrix: whether the last dim is the input features; otherwise all dims are output features.
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
    """Return every weight of the model by global name; a tied head has no weight."""
    layers = range(config.model.layers)
    placements = stage_placements(config, layers, embedding=True, head=True)
    table = GPT2 if architecture.name == "gpt2" else LLAMA
    return {name: _weight(name, tuple(p.shape), table) for name, p in placements.items()}


def _weight(name: str, shape: tuple[int, ...], table: Mapping[str, _Slices]) -> Weight:
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
        prefix = f"transformer.h.{layer}." if table is GPT2 else f"model.layers.{layer}."
    slices = table[module]
    stacked = STACKED[module] if len(slices) > 1 else None
    piece = shape if stacked is None else shape[:stacked] + shape[stacked + 1 :]
    matrix = kind == "weight" and "norm" not in module
    transposed = matrix and table is GPT2 and bool(prefix)
    rows = prod(piece[:-1]) if matrix else prod(piece)
    pieces = tuple(Piece(f"{prefix}{s}.{kind}", n * rows, (n + 1) * rows, transposed) for s, n in slices)
    return Weight(name, shape, pieces, stacked, matrix)


@dataclass(frozen=True)
class HubTensor:
    """A stored tensor of a Hugging Face folder.

    Attributes:
        name: its name in the folder.
        shape: its shape as stored.
        pieces: the weight and the index of the piece for each range of its rows, in order.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Weight, int], ...]

    @property
    def transposed(self) -> bool:
        """Whether it is stored as (in, out)."""
        weight, number = self.pieces[0]
        return weight.pieces[number].transposed


def hub_tensors_of(weights: Mapping[str, Weight]) -> dict[str, HubTensor]:
    """Return the stored tensors that the weights consist of, by name."""
    pieces: dict[str, list[tuple[Weight, int]]] = defaultdict(list)
    for weight in weights.values():
        for number, piece in enumerate(weight.pieces):
            pieces[piece.source].append((weight, number))
    return {name: _hub_tensor(name, sorted(found, key=_start)) for name, found in pieces.items()}


def _start(piece: tuple[Weight, int]) -> int:
    weight, number = piece
    return weight.pieces[number].start


def _hub_tensor(name: str, pieces: list[tuple[Weight, int]]) -> HubTensor:
    weight, number = pieces[-1]
    rows, columns = weight.pieces[number].stop, weight.columns
    shape = (rows,) if columns is None else (columns, rows) if weight.pieces[number].transposed else (rows, columns)
    return HubTensor(name, shape, tuple(pieces))
