"""The update rules of the optimizers, AdamW and SGD: torch's fused kernels on flat tensors.

The kernels are called as functions. Torch's optimizer classes import the compiler in their constructor, which costs
seconds of CPU time in every rank, and would store their state under anonymous numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megastack.errors import ConfigError

STEP = "step"
"""The kind of state that is not a moment: the number of updates."""


@dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer, and the settings that all its groups share.

    Attributes:
        name: ``adamw`` or ``sgd``.
        betas: AdamW's decay rates of the moments.
        eps: added to the root of the second moment by AdamW.
        momentum: SGD's momentum.
        weight_decay: the decay in buckets without groups, if the placement allows it.
        offload: whether to keep main parameters and moments in host memory and update them there.
    """

    name: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.0
    weight_decay: float = 0.0
    offload: bool = False


class UpdateRule(Protocol):
    """The update of parameters and their state in a step."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of moment."""

    def state(self, values: Tensor) -> dict[str, Tensor]:
        """The state of flat parameters before the first update, by kind."""

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """Update the values and their states in place, unless ``found_inf`` is 1.

        Gradients are divided by ``grad_scale``, an fp32 scalar, in place and by the same kernel.
        """


def rule_of(options: OptimizerOptions) -> UpdateRule:
    """The update rule of these options.

    Raises:
        ConfigError: there is no optimizer with this name.
    """
    if options.name not in ("adamw", "sgd"):
        raise ConfigError(f"optim.name={options.name}: no such optimizer; use adamw or sgd")
    return SGD(options.momentum) if options.name == "sgd" else AdamW(options.betas, options.eps)


@dataclass(frozen=True)
class AdamW:
    """AdamW; its state is two moments and the number of updates, which bias correction needs.

    Weight decay is decoupled (Loshchilov and Hutter 2019): a step multiplies a decaying parameter by
    ``1 - lr · lr_scale · weight_decay``. A parameter without a gradient in a step is updated with a gradient of zero.
    """

    betas: tuple[float, float]
    eps: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of moment."""
        return ("exp_avg", "exp_avg_sq")

    def state(self, values: Tensor) -> dict[str, Tensor]:
        """The state before the first update."""
        zero = torch.zeros((), dtype=torch.float32, device=values.device)
        return {"exp_avg": torch.zeros_like(values), "exp_avg_sq": torch.zeros_like(values), STEP: zero}

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """Update the values and their states in place, unless ``found_inf`` is 1.

        Gradients are divided by ``grad_scale``, an fp32 scalar, in place and by the same kernel.
        """
        adamw(
            list(values),
            list(gradients),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state[STEP] for state in states],
            foreach=False,
            fused=True,
            grad_scale=grad_scale,
            found_inf=found_inf,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class SGD:
    """SGD; its state is the momentum buffer, or nothing without momentum.

    Weight decay is added to the gradient, as in ``torch.optim.SGD``. Momentum starts from a zero buffer, which equals
    torch's first step, also after a skipped first step.
    """

    momentum: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of moment."""
        return ("momentum_buffer",) if self.momentum else ()

    def state(self, values: Tensor) -> dict[str, Tensor]:
        """The state before the first update."""
        return {"momentum_buffer": torch.zeros_like(values)} if self.momentum else {}

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[dict[str, Tensor]],
        *,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
    ) -> None:
        """Update the values and their states in place, unless ``found_inf`` is 1.

        Gradients are divided by ``grad_scale``, an fp32 scalar, in place and by the same kernel.
        """
        sgd(
            list(values),
            list(gradients),
            [state.get("momentum_buffer") for state in states],
            foreach=False,
            fused=True,
            grad_scale=grad_scale,
            found_inf=found_inf,
            weight_decay=weight_decay,
            momentum=self.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
