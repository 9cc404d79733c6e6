"""The same GPT-2-like model in plain torch, written for torch's parallelism.

Queries, keys and values are three separate layers, as DTensor's plans need them. Initial values are copied from
megastack's parameters by name, so that both sides start from the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.config.schema import ModelOptions


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """Two linear layers with GELU (tanh) in between."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(hidden), Mlp(hidden, ffn)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(self, vocab: int, length: int, hidden: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return self.tokens(ids) + self.positions(places)


class Model(nn.Module):
    """The blocks of ``layers``, with the embedding if block 0 is among them and the head if the last block is."""

    def __init__(self, options: ModelOptions, length: int, layers: Iterable[int]) -> None:
        super().__init__()
        hidden, chosen = options.hidden, list(layers)
        first, last = 0 in chosen, options.layers - 1 in chosen
        self.embedding = Embedding(options.vocab, length, hidden) if first else None
        self.blocks = nn.ModuleDict({str(layer): Block(hidden, options.heads, options.ffn) for layer in chosen})
        self.norm = nn.LayerNorm(hidden) if last else None
        self.head = nn.Linear(hidden, options.vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@torch.no_grad()
def load(model: Model, values: Mapping[str, Tensor]) -> None:
    """Copy megastack's parameters, by global name, into the model."""
    for name, parameter in model.named_parameters():
        parameter.copy_(_value(name, values).reshape(parameter.shape))


def _value(name: str, values: Mapping[str, Tensor]) -> Tensor:
    for own, theirs in (("embedding.tokens", "embedding"), ("embedding.positions", "positions"), (".query", ".q")):
        name = name.replace(own, theirs)
    for place, part in enumerate((".key", ".value")):
        if part in name:
            return values[name.replace(part, ".kv")][:, place]
    return values[name]
