"""The loss scale: a factor on the loss, and its inverse on the gradients, that keeps fp16 gradients in fp16's range.

fp16 has nothing below 6e-8 and nothing above 65504. Multiplied by a large power of two, small gradients survive the
backward; the flat buffers, masters and moments are fp32 and see the gradients divided by it again, so no result depends
on the scale. (bf16 has the range of fp32 and needs none.)

A *dynamic* scale finds its own size (Micikevicius et al. 2018): a gradient that is not finite makes every rank skip the
step and halves it, ``interval`` good steps in a row double it. Whether a gradient is finite is read off the norm, which
is alike on all ranks, so all scales are; nothing is read on the host. Scale and count are tensors that the checkpoint
holds, written in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megastack.gradients.interface import Gradients

INITIAL = 2.0**16
LOWEST = 1.0
"""A dynamic scale does not fall below this: what overflows without any scaling is no fault of the scale."""
HIGHEST = 2.0**24


class LossScale:
    """The loss scale of a run, or none.

    Args:
        initial: the scale at the start; ``None`` for none at all.
        dynamic: whether it adapts; otherwise it stays.
        interval: good steps in a row after which a dynamic scale doubles.
        device: where the run's tensors live.

    Attributes:
        value: the scale, an fp32 scalar, or ``None``.
        good_steps: good steps in a row so far.
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
            for bucket in buckets.buckets:
                bucket.local_gradients.mul_((1.0 / self.value).to(bucket.local_gradients.dtype))

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Adapt a dynamic scale after a step; ``found_inf`` is 1 where the step was skipped, alike on all ranks."""
        if self.value is None or not self.is_dynamic:
            return
        skipped = found_inf > 0
        good = torch.where(skipped, 0, self.good_steps + 1)
        grows = good >= self._interval
        kept = torch.where(grows, (self.value * 2).clamp(max=HIGHEST), self.value)
        self.value.copy_(torch.where(skipped, (self.value / 2).clamp(min=LOWEST), kept))
        self.good_steps.copy_(torch.where(grows, 0, good))

    def may_overflow(self, scale: Tensor | None) -> bool:
        """Whether a lower scale may cure a gradient that was not finite under this one.

        Reads the tensor: to be asked after a step.
        """
        return self.is_dynamic and scale is not None and float(scale) > LOWEST

    def state(self) -> dict[str, Tensor]:
        """The tensors of a dynamic scale by name; writing into them loads it."""
        if self.value is None or not self.is_dynamic:
            return {}
        return {"scale": self.value, "good_steps": self.good_steps}
