"""Keys and values of the tokens that a stage has seen, so that generating a token costs one token's work.

A token's place in the cache is its position. So rows of different lengths need no shifting: padding behind a short
prompt takes places that the row's own tokens overwrite before any query may see them, and a query sees the places up
to its own position. Nothing here knows how many layers or groups there are: an attention layer opens its entry with
the first keys that it brings, of the shape that they have on this rank.

The cache is a value that goes down with the :class:`~megastack.layers.context.Context`; layers hold nothing.

Shapes: B rows, S tokens of this call, T places, G kv groups of this rank, K head dim.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyValueCache:
    """What the attention layers of one stage remember of a batch of rows.

    Args:
        capacity: places of a row: its longest prompt and all that is generated.
        seen: places that queries of this call may see, one more than the largest position in it.
        entries: keys and values, each ``(B, capacity, G, K)``, by layer.
    """

    capacity: int
    seen: int = 0
    entries: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def up_to(self, seen: int) -> KeyValueCache:
        """The same memory for a call whose largest position is ``seen - 1``."""
        assert seen <= self.capacity, f"{seen} tokens in a cache for {self.capacity}"
        return replace(self, seen=seen)

    def extend(self, layer: Hashable, positions_BS: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> tuple[Tensor, Tensor]:
        """Remember a layer's new keys and values at their positions; all of them, ``(B, seen, G, K)``."""
        if layer not in self.entries:
            self.entries[layer] = self._empty(k_BSGK), self._empty(v_BSGK)
        keys, values = self.entries[layer]
        rows_B1 = torch.arange(len(keys), device=keys.device)[:, None]
        keys[rows_B1, positions_BS], values[rows_B1, positions_BS] = k_BSGK, v_BSGK
        return keys[:, : self.seen], values[:, : self.seen]

    def mask(self, positions_BS: Tensor) -> Tensor | None:
        """Which places each query may see, (B, 1, S, seen); None where rows begin in this call and order says it."""
        if positions_BS.shape[1] == self.seen:
            return None
        places_T = torch.arange(self.seen, device=positions_BS.device)
        return (places_T <= positions_BS[:, :, None])[:, None]

    @property
    def bytes(self) -> int:
        """Memory of all entries on this rank."""
        return sum(x.numel() * x.element_size() for pair in self.entries.values() for x in pair)

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, for a masked place still multiplies a weight of 0, and 0 times garbage may be no number.
        return like.new_zeros((like.shape[0], self.capacity, *like.shape[2:]))
