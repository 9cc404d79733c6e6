"""The learning rate as a pure function of the step: it has no state to save or restore.

Step ``t`` is 0-based: ``t = 0`` is the first update. Warm-up over ``w`` steps is linear, ``(t + 1) / w`` of the peak,
so no update has a rate of zero. After it, with ``T`` total steps, ``x = (t - w) / (T - w)`` clamped to [0, 1] and
``floor`` the minimum learning-rate ratio, the rate relative to the peak is

========  =====================================================================
constant  1
cosine    ``floor + (1 - floor) · (1 + cos(pi x)) / 2``
linear    ``1 - (1 - floor) · x``
wsd       1, then linear to ``floor`` over the last ``decay_steps`` of the ``T``
========  =====================================================================

``wsd`` is warmup-stable-decay. Beyond ``T`` the rate keeps its last value. A run that is resumed with another ``T``
follows the new curve from its step on. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megastack.errors import ConfigError


@dataclass(frozen=True)
class LearningRate:
    """A learning-rate schedule; :meth:`at` is its value at a 0-based step.

    Args:
        schedule: ``constant``, ``cosine``, ``linear`` or ``wsd`` (warmup-stable-decay).
        lr: the peak.
        warmup_steps: the length of the linear warm-up.
        total_steps: the step at which the decay ends.
        decay_steps: the length of wsd's decay; ``None`` for a fifth of the total (at least one step). Only for wsd.
        floor: the minimum learning-rate ratio: the final rate relative to the peak, for schedules that decay.

    Raises:
        ConfigError: lists every invalid value.
    """

    schedule: str
    lr: float
    warmup_steps: int = 0
    total_steps: int = 1
    decay_steps: int | None = None
    floor: float = 0.1

    def __post_init__(self) -> None:
        if errors := _errors(self):
            raise ConfigError("\n".join(errors))

    def at(self, step: int) -> float:
        """The rate of the update with 0-based number ``step``."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return self.lr * _SHAPES[self.schedule](self, step)

    @property
    def decay_length(self) -> int:
        """The length of wsd's decay in steps."""
        return max(1, self.total_steps // 5) if self.decay_steps is None else self.decay_steps


def _progress(step: int, start: int, stop: int) -> float:
    """The position of ``step`` between ``start`` and ``stop``, clamped to [0, 1]."""
    return min(1.0, max(0.0, (step - start) / (stop - start))) if stop > start else 1.0


def _constant(rate: LearningRate, step: int) -> float:
    return 1.0


def _cosine(rate: LearningRate, step: int) -> float:
    x = _progress(step, rate.warmup_steps, rate.total_steps)
    return rate.floor + (1 - rate.floor) * (1 + math.cos(math.pi * x)) / 2


def _linear(rate: LearningRate, step: int) -> float:
    return 1 - (1 - rate.floor) * _progress(step, rate.warmup_steps, rate.total_steps)


def _wsd(rate: LearningRate, step: int) -> float:
    return 1 - (1 - rate.floor) * _progress(step, rate.total_steps - rate.decay_length, rate.total_steps)


_SHAPES: Mapping[str, Callable[[LearningRate, int], float]] = MappingProxyType(
    {"constant": _constant, "cosine": _cosine, "linear": _linear, "wsd": _wsd}
)


def _errors(rate: LearningRate) -> list[str]:
    errors = []
    if rate.schedule not in _SHAPES:
        errors.append(f"lr.schedule={rate.schedule}: no such schedule; use {', '.join(_SHAPES)}")
    if not rate.lr >= 0:
        errors.append(f"optim.lr={rate.lr}: must not be negative; use e.g. 3e-4")
    if rate.warmup_steps < 0:
        errors.append(f"lr.warmup_steps={rate.warmup_steps}: must not be negative; use 0 for none")
    if rate.total_steps < 1:
        errors.append(f"lr.total_steps={rate.total_steps}: must be at least 1; use run.steps")
    if not 0 <= rate.floor <= 1:
        errors.append(f"lr.floor={rate.floor}: must be a ratio to the peak; use 0 to 1")
    return errors + _decay_errors(rate)


def _decay_errors(rate: LearningRate) -> list[str]:
    if rate.decay_steps is None:
        return []
    if rate.schedule != "wsd":
        return [f"lr.decay_steps={rate.decay_steps}: lr.schedule={rate.schedule} has none; use null, or wsd"]
    if rate.decay_steps < 1:
        return [f"lr.decay_steps={rate.decay_steps}: must be at least 1; use null for a fifth of lr.total_steps"]
    room = rate.total_steps - rate.warmup_steps
    if rate.decay_steps > room:
        return [
            f"lr.decay_steps={rate.decay_steps}: must fit between lr.warmup_steps={rate.warmup_steps} and "
            f"lr.total_steps={rate.total_steps}; use at most {max(room, 0)}"
        ]
    return []
