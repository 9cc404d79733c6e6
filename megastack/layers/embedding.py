"""The two ends of a language model, split over tp along the vocabulary: token embedding and output head.

Both own a weight ``(V, D)``, cut along V. Rows beyond the vocabulary pad it to a multiple of ``vocab_multiple``, which
does not depend on the layout; padded rows are zero, get no gradient and are in no checkpoint. The two placements are
alike, so one parameter can serve as both (tied embeddings).

Token ids are checked by the loader and not here: an id that no rank holds would come out as zeros.

Shapes: B microbatch, S sequence, D hidden, V vocabulary, Vp padded vocabulary, t tensor-parallel degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.comm.autograd import reduce_from, scatter_to
from megastack.errors import PlacementError
from megastack.layers.autocast import in_own_dtypes
from megastack.layers.kernels import add_rows_, sum_rows
from megastack.layers.linear_ops import SEQUENCE_DIM, check_dims, check_sequence, column_product, rows_of
from megastack.layers.overrides import built_in
from megastack.layers.rules import padded_vocab
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.boxes import local_shape
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Initialiser, Normal, Placement, Shard
from megastack.weight_gradients import GradientTarget, target_of


class _VocabParallel(ParallelModule):
    """A weight ``(V, D)`` cut along the padded vocabulary, its own or another layer's."""

    weight: nn.Parameter

    def __init__(
        self,
        vocab: int,
        hidden: int,
        mesh: Mesh,
        *,
        vocab_multiple: int = 128,
        sequence_parallel: bool = False,
        init: Initialiser = Normal(0.02),  # noqa: B008 - frozen
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__(mesh)
        self.vocab, self.hidden = vocab, hidden
        self.padded = padded_vocab(vocab, vocab_multiple)
        self.sequence_parallel = sequence_parallel
        self.init = init
        if weight is None:
            self.create_parameters()
        else:
            self._tie(weight)

    def placements(self) -> dict[str, Placement]:
        """The weight ``(V, D)``, allocated as ``(Vp, D)``, cut along its rows."""
        padded = (self.padded, self.hidden)
        shards = {Axis.TP: Shard(0)}
        return {"weight": Placement((self.vocab, self.hidden), shards, init=self.init, padded_shape=padded)}

    def _tie(self, weight: nn.Parameter) -> None:
        expected = local_shape(self.placements()["weight"], self.mesh.shape)
        if tuple(weight.shape) != expected:
            raise PlacementError(
                f"tied weight of shape {tuple(weight.shape)}: its layers must declare alike; use {expected}"
            )
        self.weight = weight

    def extra_repr(self) -> str:
        return f"vocab={self.vocab}, padded={self.padded}, hidden={self.hidden}, sp={self.sequence_parallel}"


class VocabParallelEmbedding(_VocabParallel):
    """Rows of the weight by token id; each rank looks up the ids it holds, and the sum over tp has them all.

    Forward all-reduces the output, or with ``sequence_parallel`` reduce-scatters it along the sequence. Backward sends
    nothing, or with ``sequence_parallel`` all-gathers the output gradient.

    Args:
        vocab: V, the number of tokens.
        hidden: D.
        mesh: the ranks to split over.
        vocab_multiple: rows are padded to a multiple of this.
        sequence_parallel: split the output along the sequence over tp.
        init: the weight's initial values.
        weight: another layer's weight to use instead of an own one.

    Raises:
        PlacementError: tp does not divide the padded vocabulary, or (in forward) the sequence.
    """

    @built_in
    def forward(self, tokens_BS: Tensor) -> Tensor:
        """``(B, S)`` ids to ``(B, S, D)``, or to ``(B, S/t, D)`` with ``sequence_parallel``."""
        group = self.mesh[Axis.TP]
        check_dims(tokens_BS, "(…, S) ids", least=int(self.sequence_parallel))
        if group.size == 1:
            return _look_up(tokens_BS, self.weight)
        rows = self.weight.shape[0]
        local_BS = tokens_BS - group.rank * rows
        elsewhere_BS = (local_BS < 0) | (local_BS >= rows)
        partial_BSD = _look_up(local_BS.masked_fill(elsewhere_BS, 0), self.weight)
        partial_BSD = partial_BSD.masked_fill(elsewhere_BS.unsqueeze(-1), 0)
        if not self.sequence_parallel:
            return reduce_from(partial_BSD, group)
        check_sequence(tokens_BS.shape[-1], group)
        return scatter_to(partial_BSD, group, SEQUENCE_DIM)


def _look_up(ids_BS: Tensor, weight: Tensor) -> Tensor:
    """Rows of a weight, whose gradient is accumulated as the pipeline requires."""
    target = target_of(weight)
    if target is None:
        return F.embedding(ids_BS, weight)
    rows_BSD: Tensor = _LookUp.apply(weight, ids_BS, target)
    return rows_BSD


class _LookUp(torch.autograd.Function):
    """``F.embedding`` whose weight gradient is accumulated in place or deferred."""

    @staticmethod
    @in_own_dtypes
    def forward(ctx: Any, weight: Tensor, ids_BS: Tensor, target: GradientTarget) -> Tensor:
        ctx.target = target
        ctx.save_for_backward(ids_BS)
        return F.embedding(ids_BS, weight)

    @staticmethod
    @in_own_dtypes
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[Tensor | None, ...]:
        (ids_BS,) = ctx.saved_tensors
        sums = _RowSums(grad_BSD, ids_BS, ctx.target.weight.shape[0])
        return ctx.target.accumulate(sums), None, None


@dataclass(frozen=True, eq=False)
class _RowSums:
    """The gradient of a weight whose rows were looked up: for each row, the sum over the places that hold it."""

    grad_BSD: Tensor
    ids_BS: Tensor
    rows: int

    def begin(self) -> None:
        """Nothing is needed from other ranks."""

    def gradient(self) -> Tensor:
        """``(rows, D)``."""
        return sum_rows(self.ids_BS, self.grad_BSD, self.rows)

    def add_to(self, gradient: Tensor) -> None:
        """Row by row where that is deterministic."""
        add_rows_(gradient, self.ids_BS.flatten(), rows_of(self.grad_BSD))


class VocabParallelHead(_VocabParallel):
    """Logits of this rank's part of the vocabulary: a column-parallel product with a weight ``(V, D)``.

    Communicates as a column-parallel layer does. The logits are never gathered; the loss is
    :func:`megastack.layers.loss.vocab_parallel_cross_entropy`. The columns of padded rows are no tokens.

    Args:
        vocab: V, the number of tokens.
        hidden: D.
        mesh: the ranks to split over.
        vocab_multiple: rows are padded to a multiple of this.
        sequence_parallel: the input is split along the sequence over tp.
        init: the weight's initial values.
        weight: another layer's weight to use instead of an own one (tied embeddings): the same parameter,
            so both layers must declare the same ``vocab``, ``vocab_multiple`` and ``init``.

    Raises:
        PlacementError: tp does not divide the padded vocabulary, or the tied weight has another shape.
    """

    @built_in
    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """``(B, S, D)``, or ``(B, S/t, D)`` with ``sequence_parallel``, to ``(B, S, Vp/t)``."""
        return column_product(
            hidden_BSD, [self.weight], [None], self.mesh[Axis.TP], sequence_parallel=self.sequence_parallel
        )[0]
