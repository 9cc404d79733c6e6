"""Data of one microbatch that the layers of a stage share: positions, documents, and tensors computed from them once.

Every layer is called as ``forward(hidden_BSD, context=None)``. Without a context, attention is causal over the whole
row, positions count from 0 and dropout is off, so that a layer can be tested alone. A context is immutable: a
recomputed forward with the same context repeats its rotations, mask and dropout.

Documents are described by offsets (:mod:`megastack.attention_mask`), from which the built-in attention computes each
document by itself. An attention layer that needs a dense mask asks for it, and only then is it computed, once for all
layers of the microbatch.

Tokens and labels are in :mod:`megastack.batch`. Shapes: B microbatch size, S sequence, K head dim, n documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megastack.attention_mask import AttentionMask
from megastack.layers.cache import KeyValueCache
from megastack.layers.rope import Rope, RotaryTables


@dataclass(frozen=True)
class Context:
    """One microbatch as the layers see it; build it with :meth:`of`.

    Args:
        positions_BS: position of each token in its document; None counts from 0.
        documents_BS: document of each token, non-decreasing in a row; None means one document per row.
        samples_B: global sample numbers, which dropout draws from.
        step: the 0-based optimizer step; in a compiled block a tensor of one element.
        seed: the seed of the run.
        scope: prefix of the names under which layers draw dropout, such as ``blocks.17``.
        rotary: rotary tables of these positions.
        attention_mask: the documents as a value on the host; None for causal attention over the row or the cache.
        cu_seqlens: its offsets on the device, (n + 1) int32.
        dtype: the dtype of :attr:`bias_B1SS`.
        cache: keys and values of earlier tokens, in generation; layers add their own to it.
        origin: in a compiled block, ``[step, number of the block]`` on the host, int64. Python numbers would be
            constants of the compiled code. The scope then has ``*`` in place of the block's number.
        recomputing: this forward recomputes activations for the backward; skip counters and other side effects.
    """

    positions_BS: Tensor | None = None
    documents_BS: Tensor | None = None
    samples_B: Tensor | None = None
    step: int = 0
    seed: int = 0
    scope: str = ""
    rotary: RotaryTables | None = None
    attention_mask: AttentionMask | None = None
    cu_seqlens: Tensor | None = None
    dtype: torch.dtype = torch.float32
    cache: KeyValueCache | None = None
    origin: Tensor | None = None
    recomputing: bool = False
    _dense: dict[torch.dtype, Tensor | None] = field(default_factory=dict, repr=False, compare=False)
    """Dense masks by dtype, shared with the contexts that :meth:`within` returns."""

    @classmethod
    def of(
        cls,
        positions_BS: Tensor | None = None,
        documents_BS: Tensor | None = None,
        samples_B: Tensor | None = None,
        *,
        attention_mask: AttentionMask | None = None,
        cu_seqlens: Tensor | None = None,
        step: int = 0,
        seed: int = 0,
        rope: Rope | None = None,
        dtype: torch.dtype = torch.float32,
        cache: KeyValueCache | None = None,
    ) -> Context:
        """The context of a microbatch, with its rotary tables computed.

        Without an ``attention_mask`` and its offsets, documents on a GPU are copied to the host, which waits for them.
        A ``cache`` requires positions and rows of one document each.
        """
        assert cache is None or (positions_BS is not None and documents_BS is None)
        rotary = rope.tables(positions_BS, dtype) if rope is not None and positions_BS is not None else None
        if documents_BS is not None and attention_mask is None:
            attention_mask = AttentionMask.of(documents_BS.cpu().numpy())
        if attention_mask is not None and cu_seqlens is None:
            assert documents_BS is not None
            cu_seqlens = torch.from_numpy(attention_mask.cu_seqlens).to(documents_BS.device)
        return cls(
            positions_BS,
            documents_BS,
            samples_B,
            step,
            seed,
            rotary=rotary,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            dtype=dtype,
            cache=cache,
        )

    def within(self, scope: str) -> Context:
        """The same context for a part of the model, whose name is added to the scope."""
        return replace(self, scope=f"{self.scope}.{scope}" if self.scope else scope)

    @property
    def mask_B1SS(self) -> Tensor | None:
        """True where a query (third dim) may see a key (fourth dim); None if attention is causal over the whole row.

        It has B·S² bytes. It is computed at first use and kept for the other layers of the microbatch.
        """
        return self._dense_mask(torch.bool)

    @property
    def bias_B1SS(self) -> Tensor | None:
        """The same as a bias of :attr:`dtype` to add to the scores: 0, or minus infinity where a key is hidden."""
        return self._dense_mask(self.dtype)

    def mask_for(self, dtype: torch.dtype) -> Tensor | None:
        """The bias for scores of this dtype, for ``scaled_dot_product_attention``; None for causal attention."""
        return self._dense_mask(dtype)

    def bias_for(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same, where None becomes the causal bias (S, S) of ``length``; it broadcasts against (B, H, S, S)."""
        bias = self._dense_mask(dtype)
        if bias is None:
            return torch.full((length, length), -torch.inf, dtype=dtype, device=device).triu_(1)
        return bias

    def _dense_mask(self, dtype: torch.dtype) -> Tensor | None:
        if dtype not in self._dense:
            mask = self._visible()
            self._dense[dtype] = mask if mask is None or dtype == torch.bool else _bias(mask, dtype)
        return self._dense[dtype]

    def _visible(self) -> Tensor | None:
        if self.cache is not None and self.positions_BS is not None:
            return self.cache.mask(self.positions_BS)
        return None if self.documents_BS is None else document_mask(self.documents_BS)

    def tables(self, rope: Rope, length: int, dtype: torch.dtype, device: torch.device) -> RotaryTables:
        """Rotary tables for these frequencies: the shared ones if they match, else computed here."""
        shared = self.rotary
        if shared is not None and (shared.rope is rope or shared.rope == rope):
            return shared
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
