"""SGD on flat buckets: torch's fused kernel, with the momentum buffers there before the first step.

Weight decay is added to the gradient, as in ``torch.optim.SGD``. Momentum starts from a zero buffer, which gives what
torch's first step gives, and does so after a skipped first step as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megastack.optim.precision import Master

MOMENTS = ("momentum_buffer",)
"""The kinds of moments, by torch's names; kept only where momentum is not 0."""


def sgd(groups: Sequence[Mapping[str, Any]], masters: Sequence[Master], *, momentum: float) -> torch.optim.Optimizer:
    """torch's fused SGD over the masters, momentum buffers zero."""
    optimizer = torch.optim.SGD([dict(group) for group in groups], lr=0.0, momentum=momentum, fused=True)
    for master in masters:
        if momentum:
            optimizer.state[master.parameter] = {kind: master.state() for kind in MOMENTS}
    return optimizer
