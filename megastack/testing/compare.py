"""The parity metric: traces of a training run, and the differences between one layout and one rank.

A gradient may differ by ``tol`` times the largest element of its tensor, or ``tol`` times a thousandth of the largest
element of the model if that is more. The same holds for weights after SGD and, in fp64, after AdamW. After AdamW in
fp32 a weight may differ by a tenth of the learning rate, since Adam turns the rounding of a gradient near zero into a
whole step. Losses and norms are compared relatively, in every step. Replicas must be bitwise identical on all ranks
that hold them, and initial weights must be identical on all layouts.

:class:`Trace` holds whole tensors, gathered on one rank; :func:`differences` compares two of them. A
:class:`RankComparison` compares one rank's parts with the whole reference, so nothing has to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megastack.checkpoint.state import StateItem
from megastack.mesh.shape import Axis
from megastack.placement.placement import Placement

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The relative difference between two layouts that rounding may cause, by compute dtype."""
SMALL_TENSOR = 1e-3
KINDS = ("loss", "norm", "gradient", "weight")
OUTPUT, INPUT_GRADIENT = "<output>", "<input gradient>"
"""Names among the gradients of a single layer: its output, and the gradient of its input."""


@dataclass
class Trace:
    """The results of a training run, as whole tensors by global name; one entry per step.

    Attributes:
        initial: the weights before the first step.
        losses: the reported loss of each step.
        norms: the gradient norm of each step, before clipping.
        gradients: the gradients of each step, before clipping.
        weights: the weights after each update.
        rates: the learning rate of each step.
        spreads: for each step, by ``gradient NAME`` or ``weight NAME``, the largest difference between replicas that
            are not identical.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    spreads: list[dict[str, float]] = field(default_factory=list)

    def add_gradients(self, whole: dict[str, Tensor], spread: Mapping[str, float]) -> None:
        """Add the gradients of a new step."""
        self.gradients.append(whole)
        self.spreads.append({f"gradient {name}": distance for name, distance in spread.items()})

    def add_weights(self, whole: dict[str, Tensor], spread: Mapping[str, float]) -> None:
        """Add the updated weights of the step."""
        self.weights.append(whole)
        self.spreads[-1] |= {f"weight {name}": distance for name, distance in spread.items()}


@dataclass(frozen=True)
class Difference:
    """A difference beyond the tolerance.

    Attributes:
        kind: ``initial weight``, ``loss``, ``norm``, ``gradient``, ``weight``, or ``replicas of`` the last two.
        name: the parameter; empty for a scalar.
        step: 0-based.
        distance: the difference in units of the tolerance.
        ratio: the least-squares factor from the reference to the other; a value near a whole number hints at the cause.
            ``None`` for replicas.
    """

    kind: str
    name: str
    step: int
    distance: float
    ratio: float | None

    def __str__(self) -> str:
        what = "gradient norm" if self.kind == "norm" else f"{self.kind} {self.name}".rstrip()
        if self.name in (OUTPUT, INPUT_GRADIENT):
            what = what.replace(f"gradient {self.name}", self.name.strip("<>"))
        by = f"{self.distance:.3g} × the tolerance"
        if self.ratio is None:
            return f"step {self.step + 1}: {what} differ between ranks by {by}, but must be identical"
        return f"step {self.step + 1}: {what} differs by {by} ({self.ratio:.6g} × the reference)"


def differences(reference: Trace, other: Trace, *, tolerance: float, adam_fp32: bool = False) -> list[Difference]:
    """All differences beyond the tolerance, by step; empty if the traces agree.

    Args:
        reference: the reference trace, usually of one rank.
        other: the trace of another layout.
        tolerance: see :data:`TOLERANCES`.
        adam_fp32: whether to apply the limit for weights after AdamW in fp32.
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
        found += _replicas(step, reference, other, tolerance)
    return found


def _initial(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor], tolerance: float) -> Iterator[Difference]:
    assert set(expected) == set(actual), f"initial weight: different names, {sorted(set(expected) ^ set(actual))}"
    for name, x in expected.items():
        if not torch.equal(x, actual[name]):
            distance = largest_difference(x, actual[name]) / max(_peak(x), 1e-300) / tolerance
            yield Difference("initial weight", name, 0, distance, least_squares_ratio(x, actual[name]))


def _replicas(step: int, reference: Trace, other: Trace, tolerance: float) -> Iterator[Difference]:
    for what, spread in other.spreads[step].items():
        kind, _, name = what.partition(" ")
        whole = (reference.gradients if kind == "gradient" else reference.weights)[step]
        scale = max(_peak(whole[name]), 1e-300)
        yield Difference(f"replicas of {kind}", name, step, spread / scale / tolerance, None)


def _tensors(
    kind: str,
    step: int,
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    tolerance: float,
    absolute: float | None = None,
) -> Iterator[Difference]:
    assert set(expected) == set(actual), f"{kind}: different names, {sorted(set(expected) ^ set(actual))}"
    for name, scale in scales(expected).items():
        limit = tolerance * scale if absolute is None else absolute
        distance = largest_difference(expected[name], actual[name]) / limit
        yield from _beyond(kind, name, step, distance, least_squares_ratio(expected[name], actual[name]))


def scales(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The scale of differences in each tensor: its largest element, or a thousandth of the largest of all tensors.

    Tensors without elements are omitted.
    """
    peaks = {name: _peak(x) for name, x in tensors.items() if x.numel()}
    largest = max(peaks.values(), default=0.0)
    return {name: max(peak, SMALL_TENSOR * largest, 1e-300) for name, peak in peaks.items()}


def largest_difference(expected: Tensor, actual: Tensor) -> float:
    """The largest difference between two tensors that have elements, of any dtype: buffers may hold integers."""
    return float((actual.double() - expected.double()).abs().max())


def _peak(x: Tensor) -> float:
    return float(x.double().abs().max())


def _beyond(kind: str, name: str, step: int, distance: float, ratio: float) -> list[Difference]:
    return [] if distance <= 1.0 else [Difference(kind, name, step, distance, ratio)]


def least_squares_ratio(expected: Tensor, actual: Tensor) -> float:
    """The factor by which ``expected`` approximates ``actual`` best; infinite if ``expected`` is zero."""
    norm = float((expected.double() ** 2).sum())
    return float((expected.double() * actual.double()).sum()) / norm if norm else float("inf")


@dataclass(frozen=True)
class Mismatch:
    """A difference beyond the tolerance on one rank.

    Attributes:
        run: the optimizer of the training run.
        kind: one of :data:`KINDS`.
        name: the parameter or buffer; empty for a scalar.
        step: 0-based.
        relative: the difference relative to the tensor's scale (:func:`scales`), or to the reference for a scalar.
        ratio: the least-squares factor from the reference.
        actual: the gradient on this rank, in the first step in which gradients differ.
        expected: the same part of the reference, in that step.
        placement: the placement of the parameter, in that step.
    """

    run: str
    kind: str
    name: str
    step: int
    relative: float
    ratio: float
    actual: Tensor | None = None
    expected: Tensor | None = None
    placement: Placement | None = None


@dataclass
class RankReport:
    """The comparison of one rank with the reference.

    Attributes:
        coordinates: the mesh coordinates of the rank.
        names: the parameters and buffers that the rank holds.
        buffers: the buffers among them.
        trained: the parameters among them that have a gradient.
        worst: the largest difference by run and kind, within the tolerance or not.
        mismatches: the differences beyond the tolerance.
    """

    coordinates: Mapping[Axis, int]
    names: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    worst: dict[str, dict[str, float]] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)


class RankComparison:
    """Compares one rank's parts of a training run with the whole reference.

    Args:
        run: the optimizer.
        placements: the placements of this rank's parameters.
        tolerance: the relative difference that rounding may cause.
        report: collects the differences.
    """

    def __init__(self, run: str, placements: Mapping[str, Placement], tolerance: float, report: RankReport) -> None:
        self.run, self.placements = run, placements
        self.tolerance, self.report = tolerance, report
        self.worst = report.worst.setdefault(run, dict.fromkeys(KINDS, 0.0))
        self.evidence_step: int | None = None

    def scalar(self, kind: str, step: int, actual: float, expected: float) -> None:
        """Compare a loss or a norm."""
        relative = abs(actual - expected) / max(abs(expected), 1e-300)
        if self._exceeds(kind, relative):
            ratio = actual / expected if expected else float("inf")
            self.report.mismatches.append(Mismatch(self.run, kind, "", step, relative, ratio))

    def tensors(self, kind: str, step: int, items: Sequence[StateItem], whole: Mapping[str, Tensor]) -> None:
        """Compare this rank's boxes of gradients, or of weights and buffers."""
        scale = scales(whole)
        for item in items:
            name = item.name.partition("/")[2]
            self.report.names.add(name)
            if kind == "gradient":
                self.report.trained.add(name)
            for box, part in item.boxes:
                expected = whole[name][box.slices]
                if part.numel():
                    self._tensor(kind, name, step, part, expected, scale[name])

    def _tensor(self, kind: str, name: str, step: int, actual: Tensor, expected: Tensor, scale: float) -> None:
        relative = largest_difference(expected, actual) / scale
        if not self._exceeds(kind, relative):
            return
        mismatch = Mismatch(self.run, kind, name, step, relative, least_squares_ratio(expected, actual))
        if kind == "gradient" and self.evidence_step in (None, step):
            self.evidence_step = step
            placement = self.placements.get(name)
            mismatch = replace(mismatch, actual=actual.clone(), expected=expected.clone(), placement=placement)
        self.report.mismatches.append(mismatch)

    def _exceeds(self, kind: str, relative: float) -> bool:
        """Record a difference. Returns whether it exceeds the tolerance; NaN does."""
        self.worst[kind] = max(self.worst[kind], relative if relative == relative else float("inf"))
        return not relative <= self.tolerance
