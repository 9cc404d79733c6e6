"""Dropout that does not depend on the parallel layout: an element's mask depends on its global index, not on its rank.

The mask is a function of (seed, step, sample number, site, position, feature); see
:func:`megastack.random.dropout_mask`. Replicas along tp therefore drop the same elements, a slice of the sequence drops
the elements that the whole sequence would have dropped there, data-parallel ranks differ, and a recomputed forward
repeats its masks. No generator is advanced, so there is no state to save or restore.
"""

from __future__ import annotations

from torch import Tensor

from megastack.comm.group import AxisGroup
from megastack.errors import ConfigError
from megastack.layers.context import Context
from megastack.random import dropout_mask


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
    length, features = x_BSD.shape[1:]
    start = group.rank * length if group is not None else 0
    kept = _mask(context, site, p, start, length, features)
    return apply_mask(x_BSD, kept, p)


def attention_dropout(weights_BHSS: Tensor, p: float, context: Context | None, site: str, *, first_head: int) -> Tensor:
    """Dropout of attention weights, drawn by (sample, global head, query, key).

    Args:
        weights_BHSS: weights of this rank's heads, (batch, head, query, key).
        first_head: global number of this rank's first head.
    """
    if context is None or p == 0:
        return weights_BHSS
    _, heads, queries, keys = weights_BHSS.shape
    rows = _mask(context, site, p, first_head * queries, heads * queries, keys)
    return apply_mask(weights_BHSS, rows.view(weights_BHSS.shape), p)


def apply_mask(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """``x`` where kept, scaled to keep its mean, else zero; in the dtype of x. Saves only the boolean mask."""
    return x.masked_fill(~kept, 0) * (1 / (1 - p))


def _mask(context: Context, site: str, p: float, start: int, length: int, features: int) -> Tensor:
    if context.samples_B is None:
        raise ConfigError(f"dropout={p:g} at {site}: masks are drawn by sample; pass a context with samples_B")
    name = f"{context.scope}.{site}" if context.scope else site
    return dropout_mask(
        context.seed, context.step, context.samples_B, name, start=start, length=length, features=features, p=p
    )
