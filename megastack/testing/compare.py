"""What a training run did, layout left out, and how far two such traces are apart.

The metric: a gradient may differ by ``tol`` times the largest element of its tensor, or of a thousandth of the largest
of the whole model where the tensor is smaller than that; weights likewise after SGD and, in fp64, after AdamW. After
AdamW in fp32 a weight may differ by a tenth of a learning rate, for Adam turns the rounding of a gradient that is
nearly zero into a whole step. Losses and norms are compared relatively, the worst step counts. What several ranks hold
copies of must be the same bits on each of them, and so must initial weights on every layout.
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
        initial: weights before the first step.
        losses: the reported loss of each step.
        norms: the gradient norm of each step, before clipping.
        gradients: of each step before clipping.
        weights: after each update.
        rates: the learning rate of each step.
        spreads: of each step, by ``gradient NAME`` or ``weight NAME``, how far the copies of several ranks are apart,
            where they are.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    spreads: list[dict[str, float]] = field(default_factory=list)

    def add_gradients(self, whole: dict[str, Tensor], spread: Mapping[str, float]) -> None:
        """Begin a step with its gradients."""
        self.gradients.append(whole)
        self.spreads.append({f"gradient {name}": distance for name, distance in spread.items()})

    def add_weights(self, whole: dict[str, Tensor], spread: Mapping[str, float]) -> None:
        """End a step with its updated weights."""
        self.weights.append(whole)
        self.spreads[-1] |= {f"weight {name}": distance for name, distance in spread.items()}


@dataclass(frozen=True)
class Difference:
    """One thing that differs by more than it may.

    Attributes:
        kind: ``initial weight``, ``loss``, ``norm``, ``gradient``, ``weight``, or ``copies of`` the last two.
        name: the parameter, empty for a scalar.
        step: 0-based.
        distance: how far apart, in units of what is allowed (1 is the limit).
        ratio: the least-squares factor from the reference to the other; near a whole number it tells a cause. ``None``
            for copies.
    """

    kind: str
    name: str
    step: int
    distance: float
    ratio: float | None

    def __str__(self) -> str:
        what = f"step {self.step}: {self.kind} {self.name}".rstrip()
        ratio = "between ranks" if self.ratio is None else f"(ratio {self.ratio:.6g})"
        return f"{what} differs by {self.distance:.3g} × the tolerance {ratio}"


def differences(reference: Trace, other: Trace, *, tolerance: float, adam_fp32: bool = False) -> list[Difference]:
    """Everything in which ``other`` leaves ``reference``, by step; empty if they agree.

    Args:
        reference: usually of one rank.
        other: of another layout.
        tolerance: see :data:`TOLERANCES`.
        adam_fp32: whether weights follow the rule for AdamW in fp32.
    """
    found = [*_initial(reference.initial, other.initial, tolerance)]
    for step in range(len(reference.losses)):
        pairs = (("loss", reference.losses, other.losses), ("norm", reference.norms, other.norms))
        for kind, expected, actual in pairs:
            distance = abs(actual[step] - expected[step]) / max(abs(expected[step]), 1e-300) / tolerance
            found += _beyond(kind, "", step, distance, actual[step] / (expected[step] or 1.0))
        found += _tensors("gradient", step, reference.gradients[step], other.gradients[step], tolerance)
        limit = 0.1 * sum(reference.rates[: step + 1]) if adam_fp32 else None
        found += _tensors("weight", step, reference.weights[step], other.weights[step], tolerance, limit)
        found += _copies(step, reference, other, tolerance)
    return found


def _initial(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], tolerance: float) -> Iterator[Difference]:
    assert set(expected) == set(actual), f"initial weight: other names, {sorted(set(expected) ^ set(actual))}"
    for name, x in expected.items():
        if not torch.equal(x, actual[name]):
            distance = largest_difference(x, actual[name]) / max(_peak(x), 1e-300) / tolerance
            yield Difference("initial weight", name, 0, distance, least_squares_ratio(x, actual[name]))


def _copies(step: int, reference: Trace, other: Trace, tolerance: float) -> Iterator[Difference]:
    for what, spread in other.spreads[step].items():
        kind, _, name = what.partition(" ")
        whole = (reference.gradients if kind == "gradient" else reference.weights)[step]
        scale = max(_peak(whole[name]), 1e-300)
        yield Difference(f"copies of {kind}", name, step, spread / scale / tolerance, None)


def _tensors(
    kind: str,
    step: int,
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    tolerance: float,
    absolute: float | None = None,
) -> Iterator[Difference]:
    assert set(expected) == set(actual), f"{kind}: other names, {sorted(set(expected) ^ set(actual))}"
    for name, scale in scales(expected).items():
        limit = tolerance * scale if absolute is None else absolute
        distance = largest_difference(expected[name], actual[name]) / limit
        yield from _beyond(kind, name, step, distance, least_squares_ratio(expected[name], actual[name]))


def scales(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """What a difference in each tensor is measured by: its largest element, or a thousandth of the largest of all.

    Tensors without elements are left out.
    """
    peaks = {name: _peak(x) for name, x in tensors.items() if x.numel()}
    largest = max(peaks.values(), default=0.0)
    return {name: max(peak, SMALL_TENSOR * largest, 1e-300) for name, peak in peaks.items()}


def largest_difference(expected: Tensor, actual: Tensor) -> float:
    """Of two tensors with elements, which buffers of integers or booleans are as well."""
    return float((actual.double() - expected.double()).abs().max())


def _peak(x: Tensor) -> float:
    return float(x.double().abs().max())


def _beyond(kind: str, name: str, step: int, distance: float, ratio: float) -> list[Difference]:
    return [] if distance <= 1.0 else [Difference(kind, name, step, distance, ratio)]


def least_squares_ratio(expected: Tensor, actual: Tensor) -> float:
    """The factor that takes the expected tensor nearest to the actual one; infinite where it is zero."""
    norm = float((expected.double() ** 2).sum())
    return float((expected.double() * actual.double()).sum()) / norm if norm else float("inf")
