"""The loss scale: a factor on the loss, and its inverse on the gradients, that keeps fp16 gradients in fp16's range.

fp16 represents magnitudes from 6e-8 to 65504. Small gradients survive the backward if the loss is multiplied by a large
power of two. The flat buffers, main parameters and moments are in fp32, and their gradients are divided by the scale,
so no result depends on it. (bf16 has the range of fp32 and needs no scale.)

A *dynamic* scale adapts (Micikevicius et al. 2018): a non-finite gradient makes every rank skip the step and halves the
scale, and ``interval`` consecutive good steps double it. The norm shows whether a gradient is finite; it is identical
on all ranks, so all scales are too. Nothing is read on the host. The scale and the number of good steps are tensors in
the checkpoint, and are written in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megastack.gradients.interface import Gradients
from megastack.gradients.norm import divide_

INITIAL = 2.0**16
LOWEST = 1.0
"""A dynamic scale does not fall below this: an overflow without scaling has another cause."""
HIGHEST = 2.0**24


class LossScale:
    """The loss scale of a run, or none.

    Args:
        initial: the scale at the start; ``None`` for no scale.
        dynamic: whether it adapts; otherwise it is constant.
        interval: the number of consecutive good steps after which a dynamic scale doubles.
        device: the device of the run's tensors.

    Attributes:
        value: the scale, an fp32 scalar, or ``None``.
        good_steps: the number of consecutive good steps so far.
    """

    def __init__(
        self,
        initial: float | None = None,
        *,
        dynamic: bool = False,
        interval: int = 2000,
        device: torch.device | str = "cpu",
    ) -> None:
        self.value = None if initial is None else torch.tensor(initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.is_dynamic = dynamic and initial is not None
        self._interval = interval

    def unscale_(self, buckets: Gradients) -> None:
        """Divide the reduced gradients by the scale."""
        if self.value is not None:
            divide_([shard.local_gradients for shard in buckets.buckets], self.value)

    @torch.no_grad()
    def update(self, found_inf: Tensor, *, held: Tensor | None = None) -> None:
        """Adapt a dynamic scale after a step.

        Args:
            found_inf: 1 if the step was skipped, identical on all ranks.
            held: a bool scalar; if it is true, nothing changes.
        """
        if self.value is None or not self.is_dynamic:
            return
        skipped = found_inf > 0
        good = torch.where(skipped, 0, self.good_steps + 1)
        grows = good >= self._interval
        kept = torch.where(grows, (self.value * 2).clamp(max=HIGHEST), self.value)
        value = torch.where(skipped, (self.value / 2).clamp(min=LOWEST), kept)
        good = torch.where(grows, 0, good)
        if held is not None:
            value, good = torch.where(held, self.value, value), torch.where(held, self.good_steps, good)
        self.value.copy_(value)
        self.good_steps.copy_(good)

    def may_overflow(self, scale: float | None) -> bool:
        """Whether a gradient that was non-finite under this scale may be finite under a lower one."""
        return self.is_dynamic and scale is not None and scale > LOWEST

    def is_overflow(self, loss: Tensor, scale: Tensor | None) -> Tensor:
        """Whether a non-finite gradient of this loss may be finite under a lower scale, decided on the device."""
        if not self.is_dynamic or scale is None:
            return torch.zeros_like(loss, dtype=torch.bool)
        return torch.isfinite(loss) & (scale > LOWEST)

    def state(self) -> dict[str, Tensor]:
        """The tensors of a dynamic scale by name; writing into them loads the scale."""
        if self.value is None or not self.is_dynamic:
            return {}
        return {"scale": self.value, "good_steps": self.good_steps}
