"""Causal self-attention with its heads split over the tensor-parallel axis.

Queries ``(H, K)`` are split on heads, keys and values ``(G, 2, K)`` on groups. Heads are contiguous, so each rank's
query heads read the groups it holds. With fewer groups than ranks, adjacent ranks hold copies of one group. The two
projections share their input and its communication. Scores stay on the rank that computes them.

The layer covers multi-head, grouped-query (Ainslie et al. 2023) and multi-query attention, with rotary positions, norms
on queries and keys (Dehghani et al. 2023), biases, and document masks. The fast path is fused attention
(:mod:`megastack.layers.attention_kernels`). Dropout of attention weights uses a slower path that forms the (S, S)
weights, because the fused kernel's random numbers depend on the parallel layout. Parameters, saved tensors, FLOPs and
rules are in :mod:`megastack.layers.attention_spec`.

Shapes: B microbatch, S sequence, D hidden, H heads, G kv groups, K head dim, t tensor-parallel degree.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor

from megastack.errors import ConfigError, PlacementError
from megastack.layers.attention_kernels import attention
from megastack.layers.attention_spec import AttentionSpec
from megastack.layers.context import Context
from megastack.layers.dropout import attention_dropout
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from megastack.layers.norm import RMSNorm
from megastack.layers.overrides import built_in
from megastack.layers.rope import Rope, rotate
from megastack.layers.rules import split_violations
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Initialiser, Normal


class ParallelAttention(ParallelModule):
    """Multi-head causal attention; communicates like one column-parallel and one row-parallel layer.

    Subclasses may override :meth:`attend`, which sees only this rank's heads, or build on ``q``, ``kv`` and ``out``.

    Attributes:
        uses_cache: a subclass that overrides a method sets it to True if generation may call it with only the new
            tokens. :meth:`attend` then receives their queries, and the keys and values of all tokens, including earlier
            ones from ``context.cache``, and uses the mask of the context. The built-in class does not set it.

    Args:
        hidden: D.
        heads: H, a multiple of t.
        mesh: the ranks to split over.
        kv_groups: G, which divides H; t divides G or G divides t. None means one group per head.
        head_dim: K; None means D / H.
        rope: rotary frequencies; None disables rotation.
        qk_norm: normalise queries and keys before the rotation.
        bias: biases in all projections.
        sequence_parallel: input and output are split along the sequence over tp.
        qkv_bias: biases in the query, key and value projections only.
        attention_dropout: drop probability of attention weights (the slower path).
        norm_eps: added to the mean square in the query and key norms.
        init: initial values of the query, key and value projections.
        out_init: initial values of the output projection; None means ``init``.

    Raises:
        ConfigError: heads, groups, head dim and rotation are inconsistent.
        PlacementError: the tensor-parallel degree does not divide heads or groups.
    """

    uses_cache: ClassVar[bool]

    def __init__(
        self,
        hidden: int,
        heads: int,
        mesh: Mesh,
        *,
        kv_groups: int | None = None,
        head_dim: int | None = None,
        rope: Rope | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        sequence_parallel: bool = False,
        qkv_bias: bool = False,
        attention_dropout: float = 0.0,
        norm_eps: float = 1e-5,
        init: Initialiser = Normal(0.02),  # noqa: B008 - frozen
        out_init: Initialiser | None = None,
    ) -> None:
        super().__init__(mesh)
        self.spec = spec = AttentionSpec(
            hidden,
            heads,
            kv_groups or None,
            head_dim or None,
            rope is not None,
            qk_norm,
            bias,
            sequence_parallel,
            qkv_bias,
            attention_dropout,
            norm_eps,
            init,
            out_init,
        )
        _check(spec, rope, mesh.shape.tp)
        self.heads, self.kv_groups, self.head_dim = heads, spec.groups, spec.width
        self.rope, self.attention_dropout = rope, attention_dropout
        self.q = ColumnParallelLinear.from_spec(spec.q, mesh)
        self.kv = ColumnParallelLinear.from_spec(spec.kv(mesh.shape.tp), mesh)
        self.q_norm = RMSNorm.from_spec(spec.head_norm, mesh) if qk_norm else None
        self.k_norm = RMSNorm.from_spec(spec.head_norm, mesh) if qk_norm else None
        self.out = RowParallelLinear.from_spec(spec.out, mesh)

    @built_in
    def forward(self, hidden_BSD: Tensor, context: Context | None = None) -> Tensor:
        """Maps ``(B, S, D)``, or ``(B, S/t, D)`` under sequence parallelism, to the same shape.

        Raises:
            PlacementError: the input does not have three dims.
        """
        if hidden_BSD.dim() != 3:
            raise PlacementError(f"input of shape {tuple(hidden_BSD.shape)}: must be (B, S, D); use a row per sequence")
        q_BSHK, kv_BSG2K = column_parallel(hidden_BSD, self.q, self.kv)
        k_BSGK, v_BSGK = _unbound(kv_BSG2K)
        if self.rope is not None and self.k_norm is None:
            v_BSGK = v_BSGK.contiguous()  # otherwise the unrotated keys would stay alive with it
        q_BSHK, k_BSGK = self._positioned(q_BSHK, k_BSGK, context)
        if context is not None and context.cache is not None:
            assert context.positions_BS is not None
            k_BSGK, v_BSGK = context.cache.extend((context.scope, self), context.positions_BS, k_BSGK, v_BSGK)
        attended_BSHK = self.attend(q_BSHK, k_BSGK, v_BSGK, context)
        return self.out(attended_BSHK.flatten(-2))

    @built_in
    def attend(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, context: Context | None) -> Tensor:
        """Attention of this rank's heads over the whole sequence; returns the shape of the queries.

        With a cache there are more keys than queries.
        """
        if self.attention_dropout and self.training and context is not None:
            q_BHSK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
            return self._attend_with_dropout(q_BHSK, k_BGSK, v_BGSK, context).transpose(1, 2)
        return attention(q_BSHK, k_BSGK, v_BSGK, context)

    @built_in
    def _positioned(self, q_BSHK: Tensor, k_BSGK: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
        """Queries and keys, normalised and rotated."""
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK), self.k_norm(k_BSGK)
        if self.rope is None:
            return q_BSHK, k_BSGK
        length, dtype = q_BSHK.shape[1], q_BSHK.dtype
        tables = (context or Context()).tables(self.rope, length, dtype, q_BSHK.device)
        return rotate(q_BSHK, k_BSGK, tables)

    @built_in
    def _attend_with_dropout(self, q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, context: Context) -> Tensor:
        """Attention with explicit weights, whose dropout is drawn by global head, query and key."""
        heads, length, groups = q_BHSK.shape[1], q_BHSK.shape[2], k_BGSK.shape[1]
        # The heads of a group read the same keys and values, so one product serves them all.
        q_BGQK = rearrange(q_BHSK, "B (G R) S K -> B G (R S) K", G=groups)
        scores_BGQS = (q_BGQK @ k_BGSK.mT) * self.head_dim**-0.5
        scores_BHSS = rearrange(scores_BGQS, "B G (R Q) S -> B (G R) Q S", Q=length)
        bias_SS = context.bias_for(length, scores_BHSS.dtype, scores_BHSS.device)  # added: autograd saves no mask
        weights_BHSS = (scores_BHSS + bias_SS).softmax(-1)
        first = self.mesh[Axis.TP].rank * heads
        kept_BHSS = attention_dropout(weights_BHSS, self.attention_dropout, context, "weights", first_head=first)
        kept_BGQS = rearrange(kept_BHSS, "B (G R) Q S -> B G (R Q) S", G=groups)
        return rearrange(kept_BGQS @ v_BGSK, "B G (R Q) K -> B (G R) Q K", Q=length)


def _unbound(kv_BSG2K: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values. The backward of the selections is one elementwise expression, which a compiler can fuse."""
    if torch.compiler.is_compiling():
        return kv_BSG2K.select(-2, 0), kv_BSG2K.select(-2, 1)
    k_BSGK, v_BSGK = kv_BSG2K.unbind(-2)
    return k_BSGK, v_BSGK


def _check(spec: AttentionSpec, rope: Rope | None, tp: int) -> None:
    """Raise for sizes that are inconsistent with each other, with the rotation or with the degree."""
    if found := spec.size_violations():
        raise ConfigError.of(found)
    if rope is not None and rope.head_dim != spec.width:
        raise ConfigError(f"rope.head_dim={rope.head_dim}: must be the layer's head_dim; use {spec.width}")
    if found := split_violations(spec, (), tp):
        raise PlacementError("\n".join(map(str, found)))
