"""SGD on flat buckets, by torch's fused kernel, called as a function (see :mod:`megastack.optim.adamw` for why).

Weight decay is added to the gradient, as in ``torch.optim.SGD``. Momentum starts from a zero buffer, which gives what
torch's first step gives, and does so after a skipped first step as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megastack.optim.main_parameters import MainParameters


@dataclass(frozen=True)
class SGD:
    """The rule of SGD; its state per bucket is the momentum buffer, or nothing without momentum."""

    momentum: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of moment."""
        return ("momentum_buffer",) if self.momentum else ()

    def state(self, master: MainParameters) -> dict[str, Tensor]:
        """The state before the first update."""
        return {"momentum_buffer": torch.zeros_like(master.values)} if self.momentum else {}

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
    ) -> None:
        """Update the values and their states in place, unless ``found_inf`` is 1."""
        sgd(
            list(values),
            list(gradients),
            [state.get("momentum_buffer") for state in states],
            foreach=False,
            fused=True,
            found_inf=found_inf,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
