"""Cross-entropy over a vocabulary that is split over tp; the logits are never gathered.

Each rank reduces its columns to two or three numbers per token: the log of the sum of exponentials, the target's logit
(zero if another rank holds it) and, for label smoothing, the sum of the logits. One all-gather of these numbers lets
every rank compute the same loss; backward needs no communication. Only the logits and one number per token are saved
for backward, which writes the probabilities directly into the gradient.

With l = log Σ exp(x) over the V real columns, target y and smoothing ε, as in torch::

    loss = l - (1 - ε) x_y - ε / V · Σ x        z-loss = z · l²  (Chowdhery et al. 2022)

Forward allocates one temporary as large as the columns. Backward allocates only the gradient, in the wider dtype first.
:mod:`megastack.layers.chunked_loss` computes the same from hidden states, without the logits of all tokens.

Columns beyond the vocabulary (padding) are excluded from the sums and have a zero gradient. Tokens labelled
:data:`IGNORED` are excluded from the loss. The loader checks labels. The loss is computed in
``promote_types(dtype, fp32)``; the gradient has the logits' dtype.

Shapes: B microbatch, S sequence, V the columns of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.comm.collectives import all_gather
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError, counted
from megastack.layers.autocast import Function, once_differentiable
from megastack.layers.kernels import exp_
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis

IGNORED = -100
"""The label of tokens that are excluded from the loss, as in torch."""


def vocab_parallel_cross_entropy(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    mesh: Mesh,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss summed over the tokens with a label, including z-loss, and their number; identical on all tp ranks.

    Sends 2 numbers per token (3 with label smoothing) to every other tp rank in one all-gather, and none in backward.

    Args:
        logits_BSV: this rank's columns ``(B, S, V/t)``, the whole sequence.
        labels_BS: the target of each token, or :data:`IGNORED`.
        mesh: the ranks.
        vocab: the real vocabulary; columns from here on are padding.
        label_smoothing: the fraction ε of the target's weight that is spread evenly over the vocabulary.
        z_loss: the weight z of the squared log of the sum of exponentials.

    Returns:
        The differentiable sum, and the count as an integer tensor.

    Raises:
        PlacementError: the shapes are inconsistent.
    """
    cross_entropy, z = vocab_parallel_losses(
        logits_BSV, labels_BS, mesh, vocab=vocab, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return cross_entropy if z is None else cross_entropy + z, (labels_BS != IGNORED).sum()


def vocab_parallel_losses(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    mesh: Mesh,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Like :func:`vocab_parallel_cross_entropy`, with separate sums of the cross-entropy and of the z-loss, if any."""
    _check_shapes(logits_BSV, labels_BS)
    shard = VocabularyShard.of(mesh[Axis.TP], logits_BSV.shape[-1], vocab)
    terms = LossTerms(label_smoothing, z_loss)
    sums = _VocabParallelLoss.apply(logits_BSV, labels_BS, shard, terms)
    return sums if z_loss else (sums, None)


def _check_shapes(logits_BSV: Tensor, labels_BS: Tensor) -> None:
    if logits_BSV.shape[:-1] != labels_BS.shape:
        raise PlacementError(
            f"labels of shape {tuple(labels_BS.shape)}: must be one per token of the logits {tuple(logits_BSV.shape)}; "
            "use logits and labels of the whole sequence"
        )


@dataclass(frozen=True)
class LossTerms:
    """The terms of the loss besides the cross-entropy.

    Args:
        smoothing: ε, the fraction of the target's weight that is spread over the vocabulary.
        z: the weight of the z-loss.
    """

    smoothing: float = 0.0
    z: float = 0.0


@dataclass(frozen=True)
class VocabularyShard:
    """The vocabulary entries ``start … start + real`` of this rank's logits, before any padding.

    Args:
        group: the ranks that hold the other entries.
        vocab: the whole vocabulary, without padding.
        start: the first entry on this rank.
        real: the number of entries on this rank.
    """

    group: AxisGroup
    vocab: int
    start: int
    real: int

    @staticmethod
    def of(group: AxisGroup, width: int, vocab: int) -> VocabularyShard:
        """The shard of this rank, whose logits have ``width`` columns.

        Raises:
            PlacementError: the columns of all ranks are fewer than the vocabulary.
        """
        if width * group.size < vocab:
            raise PlacementError(
                f"vocab={vocab}: exceeds the {counted(width, 'column')} of each of {counted(group.size, 'rank')}; "
                f"use at most {width * group.size}"
            )
        start = group.rank * width
        return VocabularyShard(group, vocab, start, min(max(vocab - start, 0), width))

    def locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's column on this rank, 0 where another rank holds it, and whether this rank holds it."""
        local = labels - self.start
        here = (local >= 0) & (local < self.real)
        return local.masked_fill(~here, 0), here

    def target_logits(self, real: Tensor, labels: Tensor) -> Tensor:
        """The logit of each token's label if this rank holds it, else zero."""
        if not self.real:
            return real.new_zeros(labels.shape)
        index, here = self.locate(labels)
        return real.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)

    def add_at_targets_(self, real: Tensor, labels: Tensor, values: Tensor) -> None:
        """Add a value at the column of each token's label if this rank holds it.

        There is one column per token, so it is read and written instead of using ``scatter_add_``, which torch rejects
        on a GPU under deterministic algorithms.
        """
        if not self.real:
            return
        index, here = self.locate(labels)
        column = index.unsqueeze(-1)
        added = torch.where(here, values, torch.zeros_like(values)).unsqueeze(-1)
        real.scatter_(-1, column, real.gather(-1, column).add_(added))


@dataclass(frozen=True)
class TokenStatistics:
    """Three numbers per token, over the whole vocabulary or over the columns of this rank.

    Attributes:
        log_sum: the log of the sum of exponentials.
        target: the logit of the label; zero on ranks that do not hold it.
        total: the sum of the logits, for label smoothing; otherwise None.
    """

    log_sum: Tensor
    target: Tensor
    total: Tensor | None

    def stacked(self) -> Tensor:
        """``(1, 2 or 3, …)``, to gather over the ranks."""
        numbers = [self.log_sum, self.target] if self.total is None else [self.log_sum, self.target, self.total]
        return torch.stack(numbers).unsqueeze(0)

    @staticmethod
    def over_ranks(gathered: Tensor) -> TokenStatistics:
        """The statistics over the vocabulary, from the stacked ones of all ranks ``(t, 2 or 3, …)``."""
        total = gathered[:, 2].sum(0) if gathered.shape[1] == 3 else None
        return TokenStatistics(torch.logsumexp(gathered[:, 0], 0), gathered[:, 1].sum(0), total)

    @staticmethod
    def joined(parts: Sequence[TokenStatistics]) -> TokenStatistics:
        """The statistics of consecutive tokens."""
        log_sum, target = (torch.cat([getattr(part, name) for part in parts]) for name in ("log_sum", "target"))
        totals = [part.total for part in parts if part.total is not None]
        return TokenStatistics(log_sum, target, torch.cat(totals) if totals else None)

    def sums(self, labels: Tensor, vocab: int, terms: LossTerms) -> tuple[Tensor, Tensor | None]:
        """The cross-entropy and the z-loss (if it has a weight), summed over the tokens with a label."""
        loss = self.log_sum - (1 - terms.smoothing) * self.target
        if self.total is not None:
            loss = loss - (terms.smoothing / vocab) * self.total
        ignored = labels == IGNORED
        cross_entropy = loss.masked_fill(ignored, 0).sum()
        return cross_entropy, terms.z * self.log_sum.square().masked_fill(ignored, 0).sum() if terms.z else None


def local_statistics(
    real: Tensor, labels: Tensor, shard: VocabularyShard, *, smooth: bool, overwrite: bool = False
) -> tuple[TokenStatistics, Tensor, Tensor]:
    """The statistics of this rank's columns, ``exp(real - top)`` and ``top``, each row's maximum, in the wider dtype.

    Args:
        real: the logits without padded columns; there may be none.
        labels: the target of each token.
        shard: the columns.
        smooth: whether to sum the logits.
        overwrite: whether the exponentials may replace the logits if their dtypes are equal.
    """
    wide = torch.promote_types(real.dtype, torch.float32)
    target = shard.target_logits(real, labels).to(wide)
    total = real.sum(-1, dtype=wide) if smooth else None
    if not real.shape[-1]:
        nothing = target.new_full(target.shape, -math.inf)
        return TokenStatistics(nothing, target, total), real.to(wide), torch.zeros_like(target)
    top = real.amax(-1).to(wide)
    top = top.masked_fill(top.isinf(), 0)
    shifted = real.sub_(top.unsqueeze(-1)) if overwrite and real.dtype == wide else torch.sub(real, top.unsqueeze(-1))
    exponentials = exp_(shifted)
    return TokenStatistics(exponentials.sum(-1).log_().add_(top), target, total), exponentials, top


def logits_gradient_(
    exponentials: Tensor, factor: Tensor, scale: Tensor, labels: Tensor, shard: VocabularyShard, smoothing: float
) -> Tensor:
    """Replace exponentials of the logits by the gradient of the logits.

    Args:
        exponentials: ``exp(real - c)`` for a constant c of each token.
        factor: for each token, the gradient of the log-sum-exp times ``exp(c - log-sum-exp)``.
        scale: the gradient of each token's cross-entropy; zero for ignored tokens.
        labels: the target of each token.
        shard: the columns.
        smoothing: ε.
    """
    gradient = exponentials.mul_(factor.unsqueeze(-1))
    if smoothing > 0:
        gradient.sub_((smoothing / shard.vocab * scale).unsqueeze(-1))
    shard.add_at_targets_(gradient, labels, (smoothing - 1) * scale)
    return gradient


class _VocabParallelLoss(Function):
    """The sum of the cross-entropy, or both sums if the z-loss has a weight."""

    @staticmethod
    def forward(
        ctx: Any, logits_BSV: Tensor, labels_BS: Tensor, shard: VocabularyShard, terms: LossTerms
    ) -> Tensor | tuple[Tensor, Tensor]:
        real_BSV = logits_BSV[..., : shard.real]
        local = local_statistics(real_BSV, labels_BS, shard, smooth=terms.smoothing > 0)[0]
        statistics = TokenStatistics.over_ranks(all_gather(local.stacked(), shard.group))
        ctx.shard, ctx.terms = shard, terms
        ctx.save_for_backward(logits_BSV, labels_BS, statistics.log_sum)
        cross_entropy, z = statistics.sums(labels_BS, shard.vocab, terms)
        return cross_entropy if z is None else (cross_entropy, z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, grad_z: Tensor | None = None) -> tuple[Tensor | None, ...]:
        logits_BSV, labels_BS, log_sum_BS = ctx.saved_tensors
        shard, terms = ctx.shard, ctx.terms
        ignored_BS, zero = labels_BS == IGNORED, log_sum_BS.new_zeros(())
        scale_BS = factor_BS = torch.where(ignored_BS, zero, grad_loss)
        if grad_z is not None:
            factor_BS = torch.where(ignored_BS, zero, grad_loss + 2 * terms.z * grad_z * log_sum_BS)
        exponentials_BSV = exp_(torch.sub(logits_BSV[..., : shard.real], log_sum_BS.unsqueeze(-1)))
        grad_BSV = logits_gradient_(exponentials_BSV, factor_BS, scale_BS, labels_BS, shard, terms.smoothing)
        grad_BSV = grad_BSV.to(logits_BSV.dtype)
        if padding := logits_BSV.shape[-1] - shard.real:
            grad_BSV = F.pad(grad_BSV, (0, padding))
        return grad_BSV, None, None, None
