"""What the ranks of a verification do: train a reference, train a layout beside it, look into modules.

The reference is known to every rank of a layout (forked ranks inherit it), so each compares its own parts and returns
only what differs. A part is held against the same part of the whole reference; copies need not be gathered to be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megastack.assemble.training import Training, build_training
from megastack.checkpoint.collect import stage_placements
from megastack.checkpoint.items import StateItem
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import MegastackError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.placement import Placement
from megastack.testing.compare import Trace, least_squares_ratio, scales
from megastack.testing.module_trace import Fault, ModuleTrace, ModuleTracer, Place, find_faults, find_reshaped
from megastack.testing.parity import perturb_items_
from megastack.testing.training import trace_training

KINDS = ("loss", "norm", "gradient", "weight")


@dataclass(frozen=True)
class Mismatch:
    """Something that differs on one rank by more than rounding.

    Attributes:
        run: the optimizer it was trained with.
        kind: ``loss``, ``norm``, ``gradient`` or ``weight``.
        name: the parameter, empty for a scalar.
        step: 0-based.
        relative: the difference in units of what it is measured by (the metric's scale, or the reference itself).
        ratio: the least-squares factor from the reference.
        actual: the gradient on this rank, where it is the first step in which gradients differ.
        expected: the reference's, the same part.
        placement: the parameter's.
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
    """What one rank of a layout found; ``worst`` is the largest difference by run and kind, allowed or not."""

    coordinates: Mapping[Axis, int]
    names: set[str] = field(default_factory=set)
    worst: dict[str, dict[str, float]] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)


@dataclass(frozen=True)
class RankFaults:
    """The modules that one rank of a layout blames, its replicated vectors as they were then, and classes by module."""

    coordinates: Mapping[Axis, int]
    faults: Sequence[Fault]
    vectors: Mapping[str, Tensor]
    classes: Mapping[str, str]


class ModuleFailed(MegastackError):
    """A module's call raised; the arguments are its name, and what led to that if it can be told (or empty)."""


def prepared(config: TrainConfig, mesh: Mesh, dataset: Dataset) -> Training:
    """A training whose parameters that start at one value are moved off it: a bias of zero hides its own faults."""
    training = build_training(config, mesh, dataset)
    perturb_items_(training.weight_items(), stage_placements(training.stages))
    training.step.optimizer.refresh_masters()
    return training


def reference_traces(runs: Mapping[str, TrainConfig], steps: int, dataset: Dataset) -> dict[str, Trace]:
    """The first steps on one rank, by run."""
    mesh = Mesh.single()
    return {run: trace_training(prepared(config, mesh, dataset), steps) for run, config in runs.items()}


def compare_training(
    runs: Mapping[str, TrainConfig],
    steps: int,
    dataset: Dataset,
    references: Mapping[str, Trace],
    tolerance: float,
) -> RankReport:
    """Train a layout and hold everything that this rank has against the reference."""
    mesh = Mesh.from_environment(mesh_shape(next(iter(runs.values()))), device="cpu")
    report = RankReport(dict(mesh.coordinates))
    for run, config in runs.items():
        training = prepared(config, mesh, dataset)
        _Comparison(run, training, references[run], tolerance, report).run(steps)
    return report


class _Comparison:
    """One training beside its reference, on one rank."""

    def __init__(self, run: str, training: Training, reference: Trace, tolerance: float, report: RankReport) -> None:
        self.name, self.training, self.reference = run, training, reference
        self.tolerance, self.report = tolerance, report
        self.placements = stage_placements(training.stages)
        self.worst = report.worst.setdefault(run, dict.fromkeys(KINDS, 0.0))
        self.evidence_step: int | None = None

    def run(self, steps: int) -> None:
        training, reference = self.training, self.reference
        for step in range(steps):

            def on_gradients(step: int = step) -> None:
                self._tensors("gradient", step, training.gradient_items(), reference.gradients[step])

            outcome = training.step(step, on_gradients)
            self._scalar("loss", step, float(outcome.loss), reference.losses[step])
            self._scalar("norm", step, float(outcome.grad_norm), reference.norms[step])
            self._tensors("weight", step, training.weight_items(), reference.weights[step])

    def _scalar(self, kind: str, step: int, actual: float, expected: float) -> None:
        relative = abs(actual - expected) / max(abs(expected), 1e-300)
        if self._counts(kind, relative):
            ratio = actual / expected if expected else float("inf")
            self.report.mismatches.append(Mismatch(self.name, kind, "", step, relative, ratio))

    def _tensors(self, kind: str, step: int, items: Sequence[StateItem], whole: Mapping[str, Tensor]) -> None:
        scale = scales(whole)
        for item in items:
            name = item.name.partition("/")[2]
            self.report.names.add(name)
            for box, part in item.boxes:
                expected = whole[name][box.slices]
                if part.numel():
                    self._tensor(kind, name, step, part, expected, scale[name])

    def _tensor(self, kind: str, name: str, step: int, actual: Tensor, expected: Tensor, scale: float) -> None:
        relative = float((actual - expected).abs().max()) / scale
        if not self._counts(kind, relative):
            return
        ratio = least_squares_ratio(expected, actual)
        found = Mismatch(self.name, kind, name, step, relative, ratio)
        if kind == "gradient" and self.evidence_step in (None, step):
            self.evidence_step = step
            found = Mismatch(
                *(self.name, kind, name, step, relative, ratio),
                actual=actual.clone(),
                expected=expected.clone(),
                placement=self.placements[name],
            )
        self.report.mismatches.append(found)

    def _counts(self, kind: str, relative: float) -> bool:
        """Note a difference, and say whether it is more than rounding; what is not a number is."""
        fails = not relative <= self.tolerance
        self.worst[kind] = max(self.worst[kind], relative if relative == relative else float("inf"))
        return fails


def reference_modules(config: TrainConfig, dataset: Dataset, samples: Sequence[int]) -> dict[int, ModuleTrace]:
    """What every module did on one rank, for the microbatches that begin with these samples."""
    training = prepared(config, Mesh.single(), dataset)
    tracer = ModuleTracer(training.stages, samples)
    training.step(0)
    return tracer.traces


def blame_modules(
    config: TrainConfig, dataset: Dataset, references: Mapping[int, ModuleTrace], tolerance: float
) -> RankFaults:
    """The modules to blame on this rank of a layout, from its first microbatch.

    Raises:
        ModuleFailed: a module's call raised.
    """
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = prepared(config, mesh, dataset)
    placements = stage_placements(training.stages)
    modules = {name: module for stage in training.stages for name, module in stage.named_modules()}
    composed = {name for name, module in modules.items() if any(True for _ in module.children())}
    sample = first_sample(config, mesh.coordinates)
    tracer = ModuleTracer(training.stages, [sample])
    try:
        training.step(0)
    except Exception as error:
        reshaped = find_reshaped(references[sample], tracer.traces[sample], composed)
        raise ModuleFailed(tracer.running, reshaped or "") from error
    tp = mesh[Axis.TP]
    faults = find_faults(references[sample], tracer.traces[sample], Place(tp.rank, tp.size), tolerance)
    classes = {name: type(module).__name__ for name, module in modules.items()}
    vectors = {name: x for name, x in tracer.vectors.items() if Axis.TP not in placements[name].shards}
    return RankFaults(dict(mesh.coordinates), faults, vectors, classes)


def first_sample(config: TrainConfig, coordinates: Mapping[Axis, int]) -> int:
    """The global number of the first sample of the first microbatch of a rank."""
    return coordinates[Axis.DP] * config.batch.micro_size
