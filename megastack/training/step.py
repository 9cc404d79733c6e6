"""One optimizer step, with the same code on one rank and on a thousand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megastack.batch import Microbatch, copy_microbatches
from megastack.comm.transfers import copy_to_device
from megastack.data.loader import Loader
from megastack.data.phases import PhasedLoader
from megastack.gradients.interface import Gradients
from megastack.gradients.norm import clip_divisor, grad_norm, is_nonfinite
from megastack.mesh.mesh import Mesh
from megastack.optim.loss_scale import LossScale
from megastack.optim.lr import LearningRate
from megastack.optim.optimizer import Optimizer
from megastack.pipeline.runtime import Pipeline


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step; its tensors are not read before the step is complete.

    Attributes:
        loss: mean nats per valid token of the global batch before the update, a scalar identical on all ranks; ``None``
            for a global batch without a valid token.
        grad_norm: norm of the whole gradient before clipping, likewise identical or ``None``.
        lr: the learning rate of the step.
        tokens: valid targets of the step, each once.
        loss_scale: the scale with which the gradients were computed, ``None`` for none.
        data_seconds: the time that this rank took to read its microbatches.
    """

    loss: Tensor | None
    grad_norm: Tensor | None
    lr: float
    tokens: int
    loss_scale: Tensor | None = None
    data_seconds: float = 0.0


@dataclass(frozen=True)
class StepData:
    """The data of a 0-based step: valid labels of the global batch, and this rank's microbatches on the host."""

    step: int
    tokens: int
    microbatches: list[Microbatch]
    seconds: float


@dataclass
class TrainStep:
    """Everything that takes part in a step; built once, called once per step.

    Calling it runs a step; ``on_gradients`` is called between the reduction of gradients and their clipping. The call
    reads no tensor on the host.

    Attributes:
        held: a bool scalar on the device, identical on all ranks. A non-finite step sets it, unless its loss scale
            overflowed; while it is set, steps compute their results and change no state. A caller that launches steps
            before it has read earlier ones needs it; with ``None``, every finite step updates.
    """

    mesh: Mesh
    loader: Loader | PhasedLoader
    pipeline: Pipeline
    buckets: Gradients
    optimizer: Optimizer
    learning_rate: LearningRate
    clip_norm: float | None
    loss_scale: LossScale = field(default_factory=LossScale)
    held: Tensor | None = None
    _prepared: dict[int, StepData] = field(default_factory=dict)

    def prepare(self, step: int) -> StepData:
        """Read the data of the 0-based ``step``, once; may be called ahead of the step."""
        if step not in self._prepared:
            began, tokens = time.perf_counter(), self.loader.global_valid_tokens(step)
            microbatches = self.loader.step(step)
            self._prepared[step] = StepData(step, tokens, microbatches, time.perf_counter() - began)
        return self._prepared[step]

    def to_device(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Copy microbatches to the device of the mesh, in one transfer that does not block."""
        return copy_microbatches(microbatches, partial(copy_to_device, device=self.mesh.device))

    def __call__(self, step: int, on_gradients: Callable[[], None] | None = None) -> StepOutcome:
        """Run the 0-based ``step``. If the loss or a gradient is not finite, no rank changes its parameters.

        For a global batch without a valid token nothing is computed and no state changes. Every rank knows the global
        count of tokens, so no rank waits for another.
        """
        data, rate = self.prepare(step), self.learning_rate.at(step)
        self._prepared = {number: ahead for number, ahead in self._prepared.items() if number >= step}
        tokens, scale = data.tokens, None if self.loss_scale.value is None else self.loss_scale.value.clone()
        if not tokens:
            return StepOutcome(None, None, rate, 0, scale, data.seconds)
        microbatches = self.to_device(data.microbatches)
        self.buckets.zero_()
        loss = self.pipeline.run(microbatches, tokens, loss_scale=scale)
        self.buckets.finish()
        self.loss_scale.unscale_(self.buckets)
        if on_gradients is not None:
            on_gradients()
        norm = grad_norm(self.buckets, self.mesh)
        nonfinite = is_nonfinite(norm + loss)
        found_inf = nonfinite if self.held is None else torch.maximum(nonfinite, self.held.to(nonfinite.dtype))
        self.optimizer.step(rate, found_inf=found_inf, grad_scale=clip_divisor(norm, self.clip_norm))
        self.loss_scale.update(found_inf, held=self.held)
        if self.held is not None:
            self.held |= (nonfinite > 0) & ~self.loss_scale.is_overflow(loss, scale)
        return StepOutcome(loss, norm, rate, tokens, scale, data.seconds)

    def replay(self, step: int, loss_scale: Tensor | None) -> None:
        """Compute the gradients of a held step again, with the loss scale that it had. No state changes."""
        value = self.loss_scale.value
        if value is None or loss_scale is None:
            self(step)
            return
        current = value.clone()
        value.copy_(loss_scale)
        self(step)
        value.copy_(current)
