"""The two ends of a language model: token embedding, learned positions, and output head.

Embedding and head own a weight ``(V, D)``, split over tp along V. It is padded with rows to a multiple of
``vocab_multiple``, which does not depend on the layout. Padded rows are zero, receive no gradient and are not stored in
checkpoints. The two placements are equal, so one parameter can serve as both (tied embeddings).

The loader checks token ids. In this module an id that no rank holds would produce zeros.

Learned positions are a table with one row per position, replicated over tp. Under sequence parallelism each rank looks
up its own slice of the positions, so the gradient is partial over tp. Rotary positions are in
:mod:`megastack.layers.rope`.

Shapes: B microbatch, S sequence, D hidden, V vocabulary, Vp padded vocabulary, t tensor-parallel degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.comm.autograd import reduce_from, scatter_to
from megastack.errors import PlacementError
from megastack.layers.autocast import Function, in_own_dtypes
from megastack.layers.kernels import add_rows_, sum_rows
from megastack.layers.linear_ops import check_dims, check_sequence, column_product
from megastack.layers.overrides import built_in
from megastack.layers.vocabulary_spec import EmbeddingSpec, HeadSpec, LearnedPositionsSpec, VocabularySpec
from megastack.layers.weight_products import SEQUENCE_DIM, rows_of
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.boxes import local_shape
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Initialiser, Normal, Placement
from megastack.weight_gradients import GradientTarget, target_of


class _VocabParallel(ParallelModule):
    """A weight ``(V, D)`` split along the padded vocabulary; it may belong to another layer."""

    SPEC: ClassVar[type[VocabularySpec]]
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
        self.spec = self.SPEC(vocab, hidden, vocab_multiple, sequence_parallel, init)
        self.sequence_parallel = sequence_parallel
        if weight is None:
            self.create_parameters()
        else:
            self._tie(weight)

    @classmethod
    def from_spec(cls, spec: VocabularySpec, mesh: Mesh) -> Self:
        """The layer of a spec, with a weight of its own."""
        return cls(
            spec.vocab,
            spec.hidden,
            mesh,
            vocab_multiple=spec.vocab_multiple,
            sequence_parallel=spec.sequence_parallel,
            init=spec.init,
        )

    def placements(self) -> dict[str, Placement]:
        """The weight ``(V, D)``, allocated as ``(Vp, D)``, split along its rows."""
        return self.spec.placements(self.mesh.shape.tp)

    def _tie(self, weight: nn.Parameter) -> None:
        expected = local_shape(self.placements()["weight"], self.mesh.shape)
        if tuple(weight.shape) != expected:
            raise PlacementError(
                f"tied weight of shape {tuple(weight.shape)}: both layers must declare the same shape; use {expected}"
            )
        self.weight = weight

    def extra_repr(self) -> str:
        spec = self.spec
        return f"vocab={spec.vocab}, padded={spec.padded}, hidden={spec.hidden}, sp={spec.sequence_parallel}"


class VocabParallelEmbedding(_VocabParallel):
    """Rows of the weight by token id; each rank looks up the ids it holds, and the results are summed over tp.

    Forward all-reduces the output, or with ``sequence_parallel`` reduce-scatters it along the sequence. Backward sends
    nothing, or with ``sequence_parallel`` all-gathers the output gradient.

    Args:
        vocab: V, the number of tokens.
        hidden: D.
        mesh: the ranks to split over.
        vocab_multiple: rows are padded to a multiple of this.
        sequence_parallel: split the output along the sequence over tp.
        init: the weight's initial values.
        weight: another layer's weight to use instead of a new one.

    Raises:
        PlacementError: tp does not divide the padded vocabulary, or (in forward) the sequence.
    """

    SPEC = EmbeddingSpec

    @built_in
    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Maps ``(B, S)`` ids to ``(B, S, D)``, or to ``(B, S/t, D)`` with ``sequence_parallel``."""
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


class _LookUp(Function):
    """``F.embedding`` whose weight gradient is accumulated in place or deferred."""

    @staticmethod
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
    """The gradient of a weight whose rows were looked up: for each row, the sum over the tokens with its id."""

    grad_BSD: Tensor
    ids_BS: Tensor
    rows: int

    def begin(self) -> None:
        """Does nothing: no data is needed from other ranks."""

    def gradient(self) -> Tensor:
        """``(rows, D)``."""
        return sum_rows(self.ids_BS, self.grad_BSD, self.rows)

    def add_to(self, gradient: Tensor) -> None:
        """Add row by row where that is deterministic."""
        add_rows_(gradient, self.ids_BS.flatten(), rows_of(self.grad_BSD))


class VocabParallelHead(_VocabParallel):
    """Logits of this rank's part of the vocabulary: a column-parallel product with a weight ``(V, D)``.

    Communicates like a column-parallel layer. The logits are never gathered; the loss is
    :func:`megastack.layers.loss.vocab_parallel_cross_entropy`. The columns of padded rows do not represent tokens.
    :func:`megastack.layers.chunked_loss.chunked_head_loss` computes head and loss together from the weight.

    Args:
        vocab: V, the number of tokens.
        hidden: D.
        mesh: the ranks to split over.
        vocab_multiple: rows are padded to a multiple of this.
        sequence_parallel: the input is split along the sequence over tp.
        init: the weight's initial values.
        weight: another layer's weight to use instead of a new one (tied embeddings); both layers must have the same
            ``vocab``, ``vocab_multiple`` and ``init``.

    Raises:
        PlacementError: tp does not divide the padded vocabulary, or the tied weight has another shape.
    """

    SPEC = HeadSpec

    @built_in
    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Maps ``(B, S, D)``, or ``(B, S/t, D)`` with ``sequence_parallel``, to ``(B, S, Vp/t)``."""
        return column_product(
            hidden_BSD, [self.weight], [None], self.mesh[Axis.TP], sequence_parallel=self.sequence_parallel
        )[0]


class LearnedPositions(ParallelModule):
    """Rows of a table by position, to add to the token embedding.

    Args:
        max_positions: rows of the table; the loader checks positions.
        hidden: D.
        mesh: the ranks that a sequence may be split over.
        sequence_parallel: return only this rank's slice of the sequence.
        init: initial values of the table.
    """

    weight: nn.Parameter

    def __init__(
        self,
        max_positions: int,
        hidden: int,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        init: Initialiser = Normal(0.02),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(mesh)
        self.spec = LearnedPositionsSpec(max_positions, hidden, sequence_parallel, init)
        self.sequence_parallel = sequence_parallel
        self.create_parameters()

    @classmethod
    def from_spec(cls, spec: LearnedPositionsSpec, mesh: Mesh) -> Self:
        """The table of a spec."""
        return cls(spec.max_positions, spec.hidden, mesh, sequence_parallel=spec.sequence_parallel, init=spec.init)

    def placements(self) -> dict[str, Placement]:
        """The replicated table; its gradient is partial over tp under sequence parallelism."""
        return self.spec.placements(self.mesh.shape.tp)

    @built_in
    def forward(self, positions_BS: Tensor) -> Tensor:
        """Maps ``(B, S)`` positions to ``(B, S, D)``, or to this rank's ``(B, S/t, D)`` under sequence parallelism.

        Raises:
            PlacementError: S is not a multiple of t under sequence parallelism.
        """
        group = self.mesh[Axis.TP]
        if self.sequence_parallel:
            check_dims(positions_BS, "(…, S) positions", least=1)
            check_sequence(positions_BS.shape[-1], group)
            positions_BS = torch.tensor_split(positions_BS, group.size, dim=-1)[group.rank]
        return F.embedding(positions_BS, self.weight)
