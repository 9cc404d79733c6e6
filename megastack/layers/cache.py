"""Key-value cache of one pipeline stage, so that generating a token computes one token.

A token is stored at the index of its position, so rows of different lengths need no shifting. The padding after a short
prompt occupies entries that the row's own tokens overwrite before any query can see them, and a query sees entries up
to its own position. The cache is independent of the number of layers and groups: an attention layer creates its entry
with its first keys, in their shape on this rank.

The cache is passed with the :class:`~megastack.layers.context.Context`; layers hold no state.

Shapes: B rows, S tokens of this call, T cached positions, G kv groups of this rank, K head dim.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of the attention layers of one stage for a batch of rows.

    Args:
        capacity: positions per row: the longest prompt plus the generated tokens.
        seen: positions visible to queries of this call, one more than its largest position.
        entries: keys and values, each ``(B, capacity, G, K)``, by layer.
    """

    capacity: int
    seen: int = 0
    entries: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def up_to(self, seen: int) -> KeyValueCache:
        """The same entries for a call whose largest position is ``seen - 1``."""
        assert seen <= self.capacity, f"{seen} tokens in a cache for {self.capacity}"
        return replace(self, seen=seen)

    def extend(self, layer: Hashable, positions_BS: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values at their positions; return all of them, ``(B, seen, G, K)``."""
        if layer not in self.entries:
            self.entries[layer] = self._empty(k_BSGK), self._empty(v_BSGK)
        keys, values = self.entries[layer]
        rows_B1 = torch.arange(len(keys), device=keys.device)[:, None]
        keys[rows_B1, positions_BS], values[rows_B1, positions_BS] = k_BSGK, v_BSGK
        return keys[:, : self.seen], values[:, : self.seen]

    def mask(self, positions_BS: Tensor) -> Tensor | None:
        """True where a query may see a cached position, (B, 1, S, seen); None if causal attention is enough."""
        if positions_BS.shape[1] == self.seen:
            return None
        places_T = torch.arange(self.seen, device=positions_BS.device)
        return (places_T <= positions_BS[:, :, None])[:, None]

    @property
    def bytes(self) -> int:
        """Bytes of all entries on this rank."""
        return sum(x.numel() * x.element_size() for pair in self.entries.values() for x in pair)

    def _empty(self, like: Tensor) -> Tensor:
        # A masked position is still multiplied by a weight of 0, and 0 times uninitialised memory may be NaN.
        return like.new_zeros((like.shape[0], self.capacity, *like.shape[2:]))
