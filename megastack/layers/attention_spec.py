"""Causal self-attention as a value: parameters, saved tensors, FLOPs and rules; torch-free.

The layer is :class:`megastack.layers.attention.ParallelAttention`. A variant adds a field here, a keyword argument
there, and a configuration key ``model.<field>``.

Shapes: B microbatch, S sequence, D hidden, H heads, G kv groups, K head dim, t tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megastack.errors import Violation
from megastack.layers.spec import (
    DEFAULT_INIT,
    LayerSpec,
    LinearSpec,
    LocalMicrobatch,
    NormSpec,
    SavedTensor,
    divisors,
    named,
)
from megastack.placement.placement import Initialiser, Placement, Shard

DENSE_BELOW = 5_000_000
"""Multiply-adds of attention below which a dense mask is fastest on a CPU, as ten kernel calls cost as much."""


def prefers_dense_mask(batch: int, sequence: int, width: int) -> bool:
    """Whether a CPU computes documents of a microbatch with a dense mask: it is so small that calls cost more.

    Args:
        batch: B.
        sequence: S.
        width: H·K of this rank.
    """
    return batch * sequence**2 * width < DENSE_BELOW


@dataclass(frozen=True)
class AttentionSpec(LayerSpec):
    """Multi-head, grouped-query or multi-query attention; fields as for ``ParallelAttention``.

    Args:
        hidden: D.
        heads: H.
        kv_groups: G; None means one group per head.
        head_dim: K; None means D / H.
        rotary: whether queries and keys are rotated.
        qk_norm: whether queries and keys are normalised before the rotation.
        bias: biases in all projections.
        sequence_parallel: input and output are split along the sequence over tp.
        qkv_bias: biases in the query, key and value projections only.
        attention_dropout: drop probability of attention weights.
        norm_eps: added to the mean square in the query and key norms.
        init: initial values of the query, key and value projections.
        out_init: initial values of the output projection; None means ``init``.
    """

    hidden: int
    heads: int
    kv_groups: int | None = None
    head_dim: int | None = None
    rotary: bool = False
    qk_norm: bool = False
    bias: bool = False
    sequence_parallel: bool = False
    qkv_bias: bool = False
    attention_dropout: float = 0.0
    norm_eps: float = 1e-5
    init: Initialiser = DEFAULT_INIT
    out_init: Initialiser | None = None

    @property
    def groups(self) -> int:
        """G, the key and value heads."""
        return self.heads if self.kv_groups is None else self.kv_groups

    @property
    def width(self) -> int:
        """K, the width of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def q(self) -> LinearSpec:
        """The query projection, split on heads."""
        return self._projection((self.heads, self.width), Shard(0))

    def kv(self, tp: int = 1) -> LinearSpec:
        """The key and value projection, split on groups; with fewer groups than ranks, adjacent ranks hold copies."""
        return self._projection((self.groups, 2, self.width), Shard(0, max(1, tp // self.groups)))

    @property
    def head_norm(self) -> NormSpec:
        """The norm of queries or keys: each rank has its own heads, so gradients are partial over tp in any case."""
        return NormSpec(self.width, norm_eps=self.norm_eps, sequence_parallel=True)

    @property
    def out(self) -> LinearSpec:
        """The output projection."""
        features, init = self.heads * self.width, self.out_init or self.init
        return LinearSpec(features, (self.hidden,), Shard(1), self.bias, self.sequence_parallel, init)

    def _projection(self, out_shape: tuple[int, ...], shard: Shard) -> LinearSpec:
        bias = self.bias or self.qkv_bias
        return LinearSpec(self.hidden, out_shape, shard, bias, self.sequence_parallel, self.init)

    def placements(self, tp: int = 1) -> dict[str, Placement]:
        """The projections and, with ``qk_norm``, the weights of the two norms."""
        norms = self.head_norm.placements() if self.qk_norm else {}
        return {
            **named("q", self.q.placements()),
            **named("kv", self.kv(tp).placements()),
            **named("q_norm", norms),
            **named("k_norm", norms),
            **named("out", self.out.placements()),
        }

    def saved(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """Queries, keys and values, the tensors saved in ``attend``, and its output for the output projection."""
        q, kv, width = self._q_shape(microbatch), self._kv_shape(microbatch), microbatch.width
        items = []
        if self.qk_norm:
            for name, shape in (("query", q), ("key", kv)):
                items.append(SavedTensor(f"{name} before its norm", shape, width))
                items += self.head_norm.statistics(name, shape[:3], microbatch.wide)
        items += [SavedTensor(name, shape, width) for name, shape in (("query", q), ("key", kv), ("value", kv))]
        return [*items, *self._saved_in_attend(microbatch), SavedTensor("attended", q, width)]

    def _saved_in_attend(self, microbatch: LocalMicrobatch) -> Iterator[SavedTensor]:
        """The tensors saved inside ``attend``: one number per row, or all weights if some of them are dropped."""
        length = microbatch.sequence
        square = (microbatch.batch, self.heads // microbatch.tp, length, length)
        if not self.attention_dropout:
            yield SavedTensor("log-sum-exp", square[:3], microbatch.wide, in_attend=True)
            return
        if self.qk_norm and microbatch.batch > 1:  # the value itself is saved with the key before its norm
            yield SavedTensor("copied value", self._kv_shape(microbatch), microbatch.width, in_attend=True)
        yield SavedTensor("weights", square, microbatch.width, in_attend=True)
        if microbatch.cpu:
            yield SavedTensor("dropped weights", square, 1, in_attend=True)
        yield SavedTensor("kept weights", square, microbatch.width, in_attend=True)

    def deferred(self, microbatch: LocalMicrobatch) -> list[SavedTensor]:
        """The gradients of all projections' outputs and the input of the last one."""
        q, width = self._q_shape(microbatch), microbatch.width
        batch, length, groups, head_dim = self._kv_shape(microbatch)
        return [
            SavedTensor("gradient of query", q, width),
            SavedTensor("gradient of key and value", (batch, length, groups, 2, head_dim), width),
            SavedTensor("attended", q, width),
            SavedTensor("gradient of attention", (batch, length, self.hidden), width),
        ]

    def shared(self, microbatch: LocalMicrobatch, *, documents: bool, recompute: bool) -> list[SavedTensor]:
        """The tensors that all attention layers of a stage share: rotary tables, and a dense mask where one is formed.

        Documents are computed from their offsets, except in a small microbatch on a CPU. With dropout of attention
        weights all scores are formed, and recompute keeps the mask for the second run.
        """
        batch, length = microbatch.batch, microbatch.sequence
        angles, bias = (batch, length, self.width // 2), (batch, 1, length, length)
        items = [SavedTensor(name, angles, microbatch.wide) for name in ("cosines", "sines") if self.rotary]
        dense = microbatch.cpu and prefers_dense_mask(batch, length, self.heads // microbatch.tp * self.width)
        if documents and (recompute if self.attention_dropout else dense):
            items.append(SavedTensor("bias", bias, microbatch.width))
        return items

    def _q_shape(self, microbatch: LocalMicrobatch) -> tuple[int, int, int, int]:
        return microbatch.batch, microbatch.sequence, self.heads // microbatch.tp, self.width

    def _kv_shape(self, microbatch: LocalMicrobatch) -> tuple[int, int, int, int]:
        return microbatch.batch, microbatch.sequence, max(self.groups // microbatch.tp, 1), self.width

    @property
    def matmul_parameters(self) -> int:
        """The three projections; copies of kv groups count once."""
        return sum(projection.matmul_parameters for projection in (self.q, self.kv(), self.out))

    def flops(self, sequence: int, *, causal: bool = True) -> int:
        """The projections, the scores and their product with the values."""
        scores = 4 * sequence * self.heads * self.width
        return 2 * self.matmul_parameters + (scores // 2 if causal else scores)

    def split_errors(self, tp: int) -> Iterator[str]:
        """Each rank holds whole heads, and whole groups or a copy of one group."""
        if self.heads % tp:
            yield f"must divide model.heads={self.heads}"
        if self.groups % tp and tp % self.groups:
            yield f"must divide model.kv_groups={self.groups} or be a multiple of it"

    def size_violations(self) -> list[Violation]:
        """Query heads, groups and head dim must be consistent with each other and with the rotation."""
        found = []
        if self.kv_groups is not None and self.heads % self.kv_groups:
            rule = f"must divide model.heads={self.heads}"
            found.append(Violation("model.kv_groups", self.kv_groups, rule, tuple(divisors(self.heads))))
        if self.head_dim is None and self.hidden % self.heads:
            rule = f"must divide model.hidden={self.hidden} where model.head_dim is null"
            found.append(Violation("model.heads", self.heads, rule, tuple(divisors(self.hidden))))
        if self.rotary and self.width % 2:
            rule = f"rotary positions pair components, so the width of a head ({self.width}) must be even"
            found.append(Violation("model.head_dim", self.head_dim, rule, (self.width + 1,)))
        return found
