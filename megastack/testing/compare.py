"""What a training run did, layout left out, and how far two such traces are apart.

The metric: a gradient may differ by ``tol`` times the largest element of its tensor, or of a thousandth of the largest
of the whole model where the tensor is smaller than that; weights likewise after SGD and, in fp64, after AdamW. After
AdamW in fp32 a weight may differ by a tenth of a learning rate, for Adam turns the rounding of a gradient that is nearly zero
into a whole step. Losses and norms are compared relatively, the worst step counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""How far rounding may drive two layouts apart, by compute dtype."""
SMALL_TENSOR = 1e-3


@dataclass
class Trace:
    """Whole tensors by global name, one entry a step.

    Attributes:
        losses: the reported loss of each step.
        norms: the gradient norm of each step, before clipping.
        gradients: of each step before clipping.
        weights: after each update.
        rates: the learning rate of each step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """One thing that differs by more than it may.

    Attributes:
        kind: ``loss``, ``norm``, ``gradient`` or ``weight``.
        name: the parameter, empty for a scalar.
        step: 0-based.
        distance: how far apart, in units of what is allowed (1 is the limit).
        ratio: the least-squares factor from the reference to the other; near a whole number it tells a cause.
    """

    kind: str
    name: str
    step: int
    distance: float
    ratio: float

    def __str__(self) -> str:
        what = f"{self.kind} {self.name}".rstrip()
        return f"step {self.step}: {what} differs by {self.distance:.3g} × the tolerance (ratio {self.ratio:.6g})"


def differences(reference: Trace, other: Trace, *, tolerance: float, adam_fp32: bool = False) -> list[Difference]:
    """Everything in which ``other`` leaves ``reference``, by step; empty if they agree.

    Args:
        reference: usually of one rank.
        other: of another layout.
        tolerance: see :data:`TOLERANCES`.
        adam_fp32: whether weights follow the rule for AdamW in fp32.
    """
    found: list[Difference] = []
    for step in range(len(reference.losses)):
        pairs = (("loss", reference.losses, other.losses), ("norm", reference.norms, other.norms))
        for kind, expected, actual in pairs:
            distance = abs(actual[step] - expected[step]) / max(abs(expected[step]), 1e-300) / tolerance
            found += _beyond(kind, "", step, distance, actual[step] / (expected[step] or 1.0))
        found += _tensors("gradient", step, reference.gradients[step], other.gradients[step], tolerance)
        limit = 0.1 * sum(reference.rates[: step + 1]) if adam_fp32 else None
        found += _tensors("weight", step, reference.weights[step], other.weights[step], tolerance, limit)
    return found


def _tensors(
    kind: str,
    step: int,
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    tolerance: float,
    absolute: float | None = None,
) -> Iterator[Difference]:
    assert set(expected) == set(actual), f"{kind}: other names, {sorted(set(expected) ^ set(actual))}"
    largest = max((float(x.abs().max()) for x in expected.values() if x.numel()), default=0.0)
    for name, x in expected.items():
        if not x.numel():
            continue
        scale = max(float(x.abs().max()), SMALL_TENSOR * largest, 1e-300)
        limit = tolerance * scale if absolute is None else absolute
        distance = float((actual[name] - x).abs().max()) / limit
        yield from _beyond(kind, name, step, distance, _ratio(x, actual[name]))


def _beyond(kind: str, name: str, step: int, distance: float, ratio: float) -> list[Difference]:
    return [] if distance <= 1.0 else [Difference(kind, name, step, distance, ratio)]


def _ratio(expected: Tensor, actual: Tensor) -> float:
    norm = float((expected.double() ** 2).sum())
    return float((expected.double() * actual.double()).sum()) / norm if norm else float("inf")
