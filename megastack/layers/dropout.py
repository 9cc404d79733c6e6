"""Dropout that does not depend on the parallel layout: an element's mask depends on its global index, not on its rank.

The mask is a function of (seed, step, sample number, site, position, feature); see
:func:`megastack.random.dropout_mask`. Replicas along tp therefore drop the same elements, a slice of the sequence drops
the elements that the whole sequence would have dropped there, data-parallel ranks differ, and a recomputed forward
repeats its masks. No generator is advanced, so there is no state to save or restore. On a CPU the backward uses the
stored mask; on a GPU, where computing it costs less than reading it, the mask is never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megastack.comm.group import AxisGroup
from megastack.errors import ConfigError
from megastack.layers import fused
from megastack.layers.autocast import Function, once_differentiable
from megastack.layers.context import Context
from megastack.layers.kernels import cpu_kernels


def dropout(
    x_BSD: Tensor,
    p: float,
    context: Context | None,
    site: str,
    *,
    group: AxisGroup | None = None,
    training: bool = True,
) -> Tensor:
    """Zero each element with probability ``p`` and scale the others by 1/(1−p).

    Args:
        x_BSD: activations of the whole sequence, or of this rank's slice of it.
        p: drop probability in [0, 1).
        context: the samples and the step to draw from; None turns dropout off.
        site: name within the layer, below ``context.scope``.
        group: the ranks that the sequence is split over, if any.
        training: False turns dropout off.

    Raises:
        ConfigError: dropout is on and the context has no sample numbers.
    """
    if context is None or p == 0 or not training:
        return x_BSD
    start = group.rank * x_BSD.shape[1] if group is not None else 0
    return _drop(x_BSD, context, _site(context, site, p), start, p)


def attention_dropout(weights_BHSS: Tensor, p: float, context: Context | None, site: str, *, first_head: int) -> Tensor:
    """Dropout of attention weights, drawn by (sample, global head, query, key).

    Args:
        weights_BHSS: weights of this rank's heads, (batch, head, query, key).
        first_head: global number of this rank's first head.
    """
    if context is None or p == 0:
        return weights_BHSS
    heads, queries = weights_BHSS.shape[1:3]
    rows = weights_BHSS.flatten(1, 2)
    return _drop(rows, context, _site(context, site, p), first_head * queries, p).unflatten(1, (heads, queries))


def _drop(x_BLF: Tensor, context: Context, site: str, start: int, p: float) -> Tensor:
    """Dropout of positions from ``start`` on, in the dtype of x. On a CPU, autograd saves the boolean mask."""
    samples_B, origin, seed, step = context.samples_B, context.origin, context.seed, context.step
    if origin is not None:
        return _Dropout.apply(x_BLF, fused.dropout_in_block, samples_B, origin, seed, site, start, p)
    if not cpu_kernels(x_BLF):
        return _Dropout.apply(x_BLF, fused.dropout, samples_B, seed, step, site, start, p)
    kept = fused.mask(samples_B, seed, step, site, start, *x_BLF.shape[1:], p)
    return x_BLF.masked_fill(~kept, 0) * (1 / (1 - p))


class _Dropout(Function):
    """One operator in each direction; backward computes the mask again, so none is saved."""

    @staticmethod
    def forward(ctx: Any, x_BLF: Tensor, operator: Callable[..., Tensor], *draw: Any) -> Tensor:
        ctx.operator, ctx.draw = operator, draw
        return operator(x_BLF, *draw)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLF: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.operator(grad_BLF, *ctx.draw), None, *[None] * len(ctx.draw)


def _site(context: Context, site: str, p: float) -> str:
    """The global name of a site."""
    if context.samples_B is None:
        raise ConfigError(f"dropout={p:g} at {site}: masks are drawn by sample; pass a context with samples_B")
    return f"{context.scope}.{site}" if context.scope else site
