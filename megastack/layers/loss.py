"""Cross-entropy over a vocabulary that is split over tp; the logits are never gathered.

Each rank reduces its columns to two or three numbers per token: the log of the sum of exponentials, the target's logit
(zero if another rank holds it) and, for label smoothing, the sum of the logits. One all-gather of these numbers lets
every rank compute the same loss; backward needs no communication. Only the logits and one number per token are saved
for backward, which writes the probabilities directly into the gradient.

With l = log Σ exp(x) over the V real columns, target y and smoothing ε, as in torch::

    loss = l - (1 - ε) x_y - ε / V · Σ x        z-loss = z · l²  (Chowdhery et al. 2022)

Forward allocates one temporary as large as the columns. Backward allocates only the gradient, in the wider dtype first.

Columns beyond the vocabulary (padding) are excluded from the sums and have a zero gradient. Tokens labelled
:data:`IGNORED` are excluded from the loss. The loader checks labels. The loss is computed in
``promote_types(dtype, fp32)``; the gradient has the logits' dtype.

Shapes: B microbatch, S sequence, V the columns of this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megastack.comm.collectives import all_gather
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError
from megastack.layers.autocast import in_own_dtypes
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
    cross_entropy, z, tokens = vocab_parallel_losses(
        logits_BSV, labels_BS, mesh, vocab=vocab, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return cross_entropy + z, tokens


def vocab_parallel_losses(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    mesh: Mesh,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like :func:`vocab_parallel_cross_entropy`, with separate sums of the cross-entropy and of the z-loss."""
    _check_shapes(logits_BSV, labels_BS, mesh[Axis.TP], vocab)
    columns = _Columns.of(mesh[Axis.TP], logits_BSV.shape[-1], vocab)
    cross_entropy, z = _VocabParallelLoss.apply(logits_BSV, labels_BS, columns, label_smoothing, z_loss)
    return cross_entropy, z, (labels_BS != IGNORED).sum()


def _check_shapes(logits_BSV: Tensor, labels_BS: Tensor, group: AxisGroup, vocab: int) -> None:
    if logits_BSV.shape[:-1] != labels_BS.shape:
        raise PlacementError(
            f"labels of shape {tuple(labels_BS.shape)}: must be one per token of the logits {tuple(logits_BSV.shape)}; "
            "use logits and labels of the whole sequence"
        )
    if logits_BSV.shape[-1] * group.size < vocab:
        raise PlacementError(
            f"vocab={vocab}: exceeds the {logits_BSV.shape[-1]} columns of each of {group.size} ranks; "
            f"use at most {logits_BSV.shape[-1] * group.size}"
        )


@dataclass(frozen=True)
class _Columns:
    """The vocabulary entries ``start … start + real`` of this rank's logits, before any padding."""

    group: AxisGroup
    vocab: int
    start: int
    real: int

    @staticmethod
    def of(group: AxisGroup, width: int, vocab: int) -> _Columns:
        start = group.rank * width
        return _Columns(group, vocab, start, min(max(vocab - start, 0), width))

    def locate(self, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's column on this rank, 0 where another rank holds it, and whether this rank holds it."""
        local = labels_BS - self.start
        here = (local >= 0) & (local < self.real)
        return local.masked_fill(~here, 0), here


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    @in_own_dtypes
    def forward(
        ctx: Any, logits_BSV: Tensor, labels_BS: Tensor, columns: _Columns, smoothing: float, z: float
    ) -> tuple[Tensor, Tensor]:
        real_BSV = logits_BSV[..., : columns.real]
        log_sum_BS, target_BS, total_BS = _over_ranks(real_BSV, labels_BS, columns, smoothing > 0)
        loss_BS = log_sum_BS - (1 - smoothing) * target_BS
        if total_BS is not None:
            loss_BS = loss_BS - (smoothing / columns.vocab) * total_BS
        ctx.columns, ctx.smoothing, ctx.z = columns, smoothing, z
        ctx.save_for_backward(logits_BSV, labels_BS, log_sum_BS)
        ignored_BS = labels_BS == IGNORED
        cross_entropy = loss_BS.masked_fill(ignored_BS, 0).sum()
        return cross_entropy, z * log_sum_BS.square().masked_fill(ignored_BS, 0).sum()

    @staticmethod
    @once_differentiable
    @in_own_dtypes
    def backward(ctx: Any, grad_loss: Tensor, grad_z: Tensor) -> tuple[Tensor | None, ...]:
        logits_BSV, labels_BS, log_sum_BS = ctx.saved_tensors
        columns, smoothing = ctx.columns, ctx.smoothing
        zero = log_sum_BS.new_zeros(())
        scale_BS = torch.where(labels_BS == IGNORED, zero, grad_loss)
        softmax_scale_BS = torch.where(labels_BS == IGNORED, zero, grad_loss + 2 * ctx.z * grad_z * log_sum_BS)
        grad_BSV = _exp_of_difference(logits_BSV[..., : columns.real], log_sum_BS)
        grad_BSV.mul_(softmax_scale_BS.unsqueeze(-1))
        if smoothing > 0:
            grad_BSV.sub_((smoothing / columns.vocab * scale_BS).unsqueeze(-1))
        if columns.real:
            index_BS, here_BS = columns.locate(labels_BS)
            at_target_BS = torch.where(here_BS, (smoothing - 1) * scale_BS, zero)
            grad_BSV.scatter_add_(-1, index_BS.unsqueeze(-1), at_target_BS.unsqueeze(-1))
        grad_BSV = grad_BSV.to(logits_BSV.dtype)
        if padding := logits_BSV.shape[-1] - columns.real:
            grad_BSV = F.pad(grad_BSV, (0, padding))
        return grad_BSV, None, None, None, None


def _over_ranks(
    real_BSV: Tensor, labels_BS: Tensor, columns: _Columns, with_total: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-sum-exp, target logit and (if ``with_total``) sum of logits, over the whole vocabulary."""
    wide = torch.promote_types(real_BSV.dtype, torch.float32)
    numbers = [_log_sum_exp(real_BSV, wide), _target(real_BSV, labels_BS, columns).to(wide)]
    if with_total:
        numbers.append(real_BSV.sum(-1, dtype=wide))
    gathered = all_gather(torch.stack(numbers).unsqueeze(0), columns.group)
    total = gathered[:, 2].sum(0) if with_total else None
    return torch.logsumexp(gathered[:, 0], 0), gathered[:, 1].sum(0), total


def _log_sum_exp(real_BSV: Tensor, wide: torch.dtype) -> Tensor:
    """``torch.logsumexp`` over the columns, which may be empty."""
    if not real_BSV.shape[-1]:
        return real_BSV.new_full(real_BSV.shape[:-1], -math.inf, dtype=wide)
    top_BS = real_BSV.amax(-1).to(wide)
    top_BS = top_BS.masked_fill(top_BS.isinf(), 0)
    return _exp_of_difference(real_BSV, top_BS).sum(-1).log_().add_(top_BS)


def _exp_of_difference(real_BSV: Tensor, from_BS: Tensor) -> Tensor:
    """``exp(real - from)`` in the dtype of ``from``."""
    return exp_(torch.sub(real_BSV, from_BS.unsqueeze(-1)))


def _target(real_BSV: Tensor, labels_BS: Tensor, columns: _Columns) -> Tensor:
    """The logit of each token's label if this rank holds it, else zero."""
    if not columns.real:
        return real_BSV.new_zeros(labels_BS.shape)
    index_BS, here_BS = columns.locate(labels_BS)
    return real_BSV.gather(-1, index_BS.unsqueeze(-1)).squeeze(-1).masked_fill(~here_BS, 0)
