"""AdamW on flat buckets: torch's fused kernel, with its state there before the first step.

Weight decay is decoupled (Loshchilov and Hutter 2019): a step multiplies a decaying parameter by
``1 - lr · lr_scale · weight_decay``. A parameter that had no gradient in a step counts as one with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megastack.optim.precision import Master

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The kinds of moments, by torch's names."""


def adamw(
    groups: Sequence[Mapping[str, Any]], masters: Sequence[Master], *, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """torch's fused AdamW over the masters, moments zero and step counters at 0."""
    optimizer = torch.optim.AdamW([dict(group) for group in groups], lr=0.0, betas=betas, eps=eps, fused=True)
    for master in masters:
        step = torch.zeros((), dtype=torch.float32, device=master.parameter.device)
        optimizer.state[master.parameter] = {"step": step, **{kind: master.state() for kind in MOMENTS}}
    return optimizer
