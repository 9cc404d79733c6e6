"""The output head and the loss together, in chunks of tokens, so that the logits of all tokens never exist.

For a large vocabulary the logits and their gradient are the largest tensors of a training step. They are only needed to
compute the loss, the gradient of the hidden states and the gradient of the head's weight, and all three are sums over
tokens. :func:`chunked_head_loss` therefore computes logits, loss and both gradients in the forward, for one chunk of
tokens after another. The loss is a sum, so its gradient is the same for all tokens, and the backward multiplies the two
stored gradients by it::

    logits = x Wᵀ                       one chunk (c, V/t)
    l, x_y -> all-gather over tp        2 numbers per token, 3 with label smoothing
    g = softmax(logits) - target        in place of the logits
    dx = g W,  dW += gᵀ x               (T, D) in the dtype of x, (V/t, D) in fp32 or wider

Liger Kernel (Hsu et al. 2024) computes gradients in the forward as well. The alternative is to save the hidden states
and to compute the logits again in backward (cut cross-entropy, Wijmans et al. 2024). It needs no buffer for dW, but a
fourth matrix product, a third more time for the head. The gradients are not added to ``.grad`` in the forward, because
only the backward shows that the loss is used, and with which factor. Without grad mode no gradient is computed.

On several tensor-parallel ranks the gradient of a chunk depends on the columns of all ranks, so statistics are gathered
chunk by chunk, with as many bytes as for whole logits. The gather overlaps with the logits of the next chunk, so two
chunks exist at a time. The gradient of the hidden states is reduced in the forward, which overlaps with the last
product for the weight. Under sequence parallelism the input is gathered once; the backward does not need it.

The weight's gradient is complete before the backward, so schedules that split backwards add it in I, not in W.

Shapes: B microbatch, S sequence, T = B·S tokens, D hidden, V the columns of this rank without padding, t the size of
the group.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.comm.collectives import Pending, all_gather, start_all_gather, start_all_reduce_, start_reduce_scatter
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError, counted
from megastack.layers.autocast import Function, once_differentiable, product_dtype
from megastack.layers.kernels import add_product_, exp_
from megastack.layers.loss import (
    IGNORED,
    LossTerms,
    TokenStatistics,
    VocabularyShard,
    local_statistics,
    logits_gradient_,
)
from megastack.layers.weight_products import SEQUENCE_DIM, rows_of
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.weight_gradients import GradientTarget, target_of

UNIT = {torch.float16: 2.0**8}
"""The gradient of the loss in the forward, by the dtype of the logits; 1 for others.

Most probabilities are below the smallest normal number of fp16, 6e-5. A power of two changes no digit.
"""


def chunked_head_loss(
    hidden_BSD: Tensor,
    weight: Tensor,
    labels_BS: Tensor,
    mesh: Mesh,
    *,
    vocab: int,
    chunk: int,
    sequence_parallel: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of the logits ``hidden @ weight.T``, like a head with a vocabulary-parallel loss after it.

    Sends as many bytes as these, with one small all-gather per chunk, but under sequence parallelism without the second
    gather of the input.

    Args:
        hidden_BSD: ``(B, S, D)``, or ``(B, S/t, D)`` with ``sequence_parallel``.
        weight: this rank's rows ``(Vp/t, D)`` of the head's weight, padding included.
        labels_BS: the target of each token of the whole sequence, or :data:`~megastack.layers.loss.IGNORED`.
        mesh: the ranks.
        vocab: the vocabulary without padding.
        chunk: the number of tokens of a chunk, the same on every tp rank.
        sequence_parallel: the hidden states are split along the sequence over tp.
        label_smoothing: the fraction of the target's weight that is spread evenly over the vocabulary.
        z_loss: the weight of the squared log of the sum of exponentials.

    Returns:
        The differentiable sum over the tokens with a label, including z-loss, and the sum of the cross-entropy alone,
        which has no gradient; identical on all tp ranks.

    Raises:
        PlacementError: the shapes are inconsistent.
    """
    group = mesh[Axis.TP]
    sequence = hidden_BSD.shape[-2] * (group.size if sequence_parallel else 1)
    if labels_BS.shape != (*hidden_BSD.shape[:-2], sequence):
        raise PlacementError(
            f"labels of shape {tuple(labels_BS.shape)}: must be one per token of the hidden states "
            f"{tuple(hidden_BSD.shape)} over {counted(group.size, 'rank')}; use the labels of the whole sequence"
        )
    dtype = product_dtype(hidden_BSD)
    weight = weight.to(dtype)
    shard = VocabularyShard.of(group, weight.shape[0], vocab)
    terms = LossTerms(label_smoothing, z_loss)
    plan = _Plan(shard, terms, chunk, sequence_parallel, differentiable=torch.is_grad_enabled())
    objective, cross_entropy = _ChunkedHeadLoss.apply(hidden_BSD.to(dtype), weight, labels_BS, plan, target_of(weight))
    return objective, cross_entropy


@dataclass(frozen=True)
class _Plan:
    """The arguments of the forward that are not tensors."""

    shard: VocabularyShard
    terms: LossTerms
    chunk: int
    sequence_parallel: bool
    differentiable: bool

    @property
    def group(self) -> AxisGroup:
        return self.shard.group


class _ChunkedHeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSD: Tensor, weight: Tensor, labels_BS: Tensor, plan: _Plan, target: GradientTarget | None
    ) -> tuple[Tensor, Tensor]:
        whole_BSD = all_gather(x_BSD, plan.group, SEQUENCE_DIM) if plan.sequence_parallel else x_BSD
        needs = tuple(needed and plan.differentiable for needed in ctx.needs_input_grad[:2])
        chunks = _Chunks(plan, whole_BSD, weight, labels_BS, *needs)
        objective, cross_entropy = chunks.run()
        ctx.unit, ctx.target, ctx.dtype = chunks.unit, target, weight.dtype
        ctx.save_for_backward(chunks.reduced_input_gradient(), chunks.grad_weight)
        ctx.mark_non_differentiable(cross_entropy)
        ctx.set_materialize_grads(False)
        return objective, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight = ctx.saved_tensors
        scale = grad / ctx.unit
        if grad_x is not None:
            grad_x = (grad_x.to(scale.dtype) * scale).to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = _accumulate(ctx.target, grad_weight, scale, ctx.dtype)
        return grad_x, grad_weight, None, None, None


def _accumulate(target: GradientTarget | None, gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Add the scaled gradient to ``.grad`` in one pass, or return it if autograd has to accumulate it."""
    buffer = target.buffer() if target is not None and target.is_accumulated else None
    if buffer is None or buffer.dtype != gradient.dtype:
        return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))
    buffer.addcmul_(gradient, scale)
    return None


@dataclass
class _Chunk:
    """A chunk whose statistics are being gathered; its exponentials are dropped if no gradient is needed."""

    rows: slice
    exponentials_TV: Tensor | None
    top_T: Tensor
    gathering: Pending


class _Chunks:
    """The pass over the chunks of one microbatch.

    Attributes:
        unit: the gradient of the loss for which the gradients below are computed.
        grad_weight: the gradient of the weight in the wider dtype, if needed; zero for padded rows.
    """

    def __init__(
        self, plan: _Plan, x_BSD: Tensor, weight: Tensor, labels_BS: Tensor, needs_input: bool, needs_weight: bool
    ) -> None:
        self._plan = plan
        self._x_TD, self._weight_VD, self._labels_T = rows_of(x_BSD), weight[: plan.shard.real], labels_BS.flatten()
        self._statistics: list[TokenStatistics] = []
        self._grad_x_BSD = torch.empty_like(x_BSD, memory_format=torch.contiguous_format) if needs_input else None
        self._reduction: Pending | None = None
        self.unit = UNIT.get(x_BSD.dtype, 1.0)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None

    def run(self) -> tuple[Tensor, Tensor]:
        """Run all chunks; returns the loss with and without z-loss."""
        tokens, plan = len(self._labels_T), self._plan
        running: deque[_Chunk] = deque()
        for start in range(0, tokens or 1, plan.chunk):
            running.append(self._start(slice(start, min(start + plan.chunk, tokens))))
            if len(running) > (plan.group.size > 1):  # the gather of one chunk overlaps with the product of the next
                self._finish(running.popleft())
        while running:
            self._finish(running.popleft())
        cross_entropy, z = TokenStatistics.joined(self._statistics).sums(self._labels_T, plan.shard.vocab, plan.terms)
        return cross_entropy.clone() if z is None else cross_entropy + z, cross_entropy

    def reduced_input_gradient(self) -> Tensor | None:
        """The gradient of the input, summed over the ranks, if needed."""
        return None if self._reduction is None else self._reduction.wait()

    def _start(self, rows: slice) -> _Chunk:
        """Compute the logits of a chunk and start the gather of their statistics."""
        logits_TV = F.linear(self._x_TD[rows], self._weight_VD)
        shard, smooth = self._plan.shard, self._plan.terms.smoothing > 0
        local, exponentials_TV, top_T = local_statistics(
            logits_TV, self._labels_T[rows], shard, smooth=smooth, overwrite=True
        )
        gathering = start_all_gather(local.stacked(), shard.group)
        return _Chunk(rows, exponentials_TV if self._needs_gradients else None, top_T, gathering)

    @property
    def _needs_gradients(self) -> bool:
        return self._grad_x_BSD is not None or self.grad_weight is not None

    def _finish(self, chunk: _Chunk) -> None:
        """Complete the statistics of a chunk and add its part of the gradients."""
        statistics = TokenStatistics.over_ranks(chunk.gathering.wait())
        self._statistics.append(statistics)
        if chunk.exponentials_TV is None:
            return
        x_TD = self._x_TD[chunk.rows]
        gradient_TV = self._logits_gradient(chunk, statistics.log_sum).to(x_TD.dtype)
        chunk.exponentials_TV = None
        if self._grad_x_BSD is not None:
            torch.mm(gradient_TV, self._weight_VD, out=rows_of(self._grad_x_BSD)[chunk.rows])
            if chunk.rows.stop == len(self._x_TD):
                self._reduction = self._start_reduction(self._grad_x_BSD)
        if self.grad_weight is not None:
            add_product_(self.grad_weight[: self._plan.shard.real], gradient_TV.T, x_TD)

    def _logits_gradient(self, chunk: _Chunk, log_sum_T: Tensor) -> Tensor:
        shard, terms, labels_T = self._plan.shard, self._plan.terms, self._labels_T[chunk.rows]
        ignored_T, zero = labels_T == IGNORED, log_sum_T.new_zeros(())
        scale_T = torch.where(ignored_T, zero, self.unit)
        factor_T = scale_T * (1 + 2 * terms.z * log_sum_T) if terms.z else scale_T
        # No column exceeds the sum over all of them, except for ranks without a finite one, whose exponentials are 0.
        factor_T = factor_T * exp_((chunk.top_T - log_sum_T).clamp_(max=0))
        assert chunk.exponentials_TV is not None
        return logits_gradient_(chunk.exponentials_TV, factor_T, scale_T, labels_T, shard, terms.smoothing)

    def _start_reduction(self, grad_BSD: Tensor) -> Pending:
        if self._plan.sequence_parallel:
            return start_reduce_scatter(grad_BSD, self._plan.group, SEQUENCE_DIM)
        return start_all_reduce_(grad_BSD, self._plan.group)
