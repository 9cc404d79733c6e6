"""AdamW on flat buckets, by torch's fused kernel.

Weight decay is decoupled (Loshchilov and Hutter 2019): a step multiplies a decaying parameter by
``1 - lr · lr_scale · weight_decay``. A parameter that had no gradient in a step counts as one with a gradient of zero.

The kernel is called as a function: torch's optimizer classes import the compiler when they are made, seconds of CPU
time in every rank, and would keep state under anonymous numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megastack.optim.main_parameters import MainParameters


@dataclass(frozen=True)
class AdamW:
    """The rule of AdamW; its state is two moments and the count of updates that bias correction needs."""

    betas: tuple[float, float]
    eps: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of moment."""
        return ("exp_avg", "exp_avg_sq")

    def state(self, master: MainParameters) -> dict[str, Tensor]:
        """The state before the first update."""
        values = master.values
        zero = torch.zeros((), dtype=torch.float32, device=values.device)
        return {"exp_avg": torch.zeros_like(values), "exp_avg_sq": torch.zeros_like(values), "step": zero}

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
        adamw(
            list(values),
            list(gradients),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )
