"""Data of one microbatch that the layers of a stage share: positions, documents, and tensors computed from them once.

Every layer is called as ``forward(hidden_BSD, context=None)``. Without a context, attention is causal over the whole
row, positions count from 0 and dropout is off, so that a layer can be tested alone. A context is immutable: a
recomputed forward with the same context repeats its rotations, mask and dropout.

Tokens and labels are in :mod:`megastack.batch`. Shapes: B microbatch size, S sequence, K head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megastack.layers.cache import KeyValueCache
from megastack.layers.rope import Rope, RotaryTables


@dataclass(frozen=True)
class Context:
    """One microbatch as the layers see it; build it with :meth:`of`.

    Args:
        positions_BS: position of each token in its document; None counts from 0.
        documents_BS: document of each token, non-decreasing in a row; None means one document per row.
        samples_B: global sample numbers, which dropout draws from.
        step: the 0-based optimizer step.
        seed: the seed of the run.
        scope: prefix of the names under which layers draw dropout, such as ``blocks.17``.
        rotary: rotary tables of these positions.
        mask_B1SS: True where a query (third dim) may see a key (fourth dim); None for a causal mask.
        bias_B1SS: the mask as a bias that is added to the scores, computed once so that no layer saves its own copy.
        cache: keys and values of earlier tokens, in generation; layers add their own to it.
        recomputing: this forward recomputes activations for the backward; skip counters and other side effects.
    """

    positions_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    samples_B: Tensor | None = None
    step: int = 0
    seed: int = 0
    scope: str = ""
    rotary: RotaryTables | None = None
    mask_B1SS: Tensor | None = None
    bias_B1SS: Tensor | None = None
    cache: KeyValueCache | None = None
    recomputing: bool = False

    @classmethod
    def of(
        cls,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        samples_B: Tensor | None = None,
        *,
        step: int = 0,
        seed: int = 0,
        rope: Rope | None = None,
        dtype: torch.dtype = torch.float32,
        cache: KeyValueCache | None = None,
    ) -> Context:
        """The context of a microbatch, with its rotary tables and its mask computed.

        A ``cache`` requires positions and rows of one document each.
        """
        rotary = rope.tables(positions_BS, dtype) if rope is not None and positions_BS is not None else None
        mask = None if documents_BS is None else document_mask(documents_BS)
        if cache is not None:
            assert positions_BS is not None and documents_BS is None
            mask = cache.mask(positions_BS)
        bias = None if mask is None else _bias(mask, dtype)
        return cls(positions_BS, documents_BS, samples_B, step, seed, "", rotary, mask, bias, cache)

    def within(self, scope: str) -> Context:
        """The same context for a part of the model, whose name is added to the scope."""
        return replace(self, scope=f"{self.scope}.{scope}" if self.scope else scope)

    def mask_for(self, dtype: torch.dtype) -> Tensor | None:
        """The mask for fused attention: the shared bias if it has this dtype, else the boolean mask."""
        return self.bias_B1SS if self.bias_B1SS is not None and self.bias_B1SS.dtype == dtype else self.mask_B1SS

    def bias_for(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A bias of this dtype to add to the scores, 0 or minus infinity, that broadcasts against (B, H, S, S)."""
        if self.mask_B1SS is None:
            return torch.full((length, length), -torch.inf, dtype=dtype, device=device).triu_(1)
        mask = self.mask_for(dtype)
        assert mask is not None
        return _bias(mask, dtype) if mask.dtype == torch.bool else mask

    def tables(self, rope: Rope, length: int, dtype: torch.dtype, device: torch.device) -> RotaryTables:
        """Rotary tables for these frequencies: the shared ones if they match, else computed here."""
        if self.rotary is not None and self.rotary.rope == rope:
            return self.rotary
        positions = self.positions_BS
        if positions is None:
            positions = torch.arange(length, device=device)[None]
        return rope.tables(positions, dtype)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def document_mask(documents_BS: Tensor) -> Tensor:
    """(B, 1, S, S), True where the key is not later than the query and in the same document."""
    length = documents_BS.shape[-1]
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=documents_BS.device).tril()
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return (same_BSS & causal_SS)[:, None]
