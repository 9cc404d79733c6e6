"""What the ranks of a verification do: train a reference, train a layout beside it, look into modules.

The reference is known to every rank of a layout (forked ranks inherit it), so each compares its own parts and returns
only what differs. A part is held against the same part of the whole reference; copies need not be gathered to be seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from megastack.assemble.training import Training, build_training
from megastack.checkpoint.state import StateItem, stage_placements
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import MegastackError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.placement import Placement
from megastack.testing.blame import Classes, RankDeviations, find_deviations, is_packaged
from megastack.testing.compare import Trace, largest_difference, least_squares_ratio, scales
from megastack.testing.module_trace import ModuleTrace, ModuleTracer, find_reshaped
from megastack.testing.perturb import perturb_items_
from megastack.testing.probes import Probed, Prober, seed_generators
from megastack.testing.training import as_number, trace_training

KINDS = ("loss", "norm", "gradient", "weight")
WATCHED = 4
"""Microbatches of each rank whose modules are watched at most."""


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


class ModuleFailed(MegastackError):
    """A module's call raised; the arguments are its name, its class, and what led to that if it can be told."""


def prepared(config: TrainConfig, mesh: Mesh, dataset: Dataset) -> Training:
    """A training whose parameters that start at one value are moved off it: a bias of zero hides its own faults."""
    training = build_training(config, mesh, dataset)
    perturb_items_(training.weight_items(), stage_placements(training.stages))
    training.step.optimizer.copy_model_to_main()
    return training


def seed_rank(mesh: Mesh) -> None:
    """Seed the process's generators otherwise than on one rank: what draws from them must not agree by luck."""
    seed_generators(1 + mesh.rank)


def seed_reference() -> None:
    """Seed the generators of the reference."""
    seed_generators(0)


def reference_traces(runs: Mapping[str, TrainConfig], steps: int, dataset: Dataset) -> dict[str, Trace]:
    """The first steps on one rank, by run."""
    mesh = Mesh.single()
    traces = {}
    for run, config in runs.items():
        training = prepared(config, mesh, dataset)
        seed_reference()
        traces[run] = trace_training(training, steps)
    return traces


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
        seed_rank(mesh)
        comparison = Comparison(run, stage_placements(training.stages), tolerance, report)
        _compare_steps(training, steps, references[run], comparison)
    return report


class Comparison:
    """Parts of one training beside the whole of its reference, on one rank.

    Args:
        run: the optimizer.
        placements: of this rank's parameters.
        tolerance: the relative difference that rounding may make.
        report: where differences are noted.
    """

    def __init__(self, run: str, placements: Mapping[str, Placement], tolerance: float, report: RankReport) -> None:
        self.run, self.placements = run, placements
        self.tolerance, self.report = tolerance, report
        self.worst = report.worst.setdefault(run, dict.fromkeys(KINDS, 0.0))
        self.evidence_step: int | None = None

    def scalar(self, kind: str, step: int, actual: float, expected: float) -> None:
        """Compare a loss or a norm."""
        relative = abs(actual - expected) / max(abs(expected), 1e-300)
        if self._counts(kind, relative):
            ratio = actual / expected if expected else float("inf")
            self.report.mismatches.append(Mismatch(self.run, kind, "", step, relative, ratio))

    def tensors(self, kind: str, step: int, items: Sequence[StateItem], whole: Mapping[str, Tensor]) -> None:
        """Compare this rank's boxes of gradients or weights."""
        scale = scales(whole)
        for item in items:
            name = item.name.partition("/")[2]
            self.report.names.add(name)
            for box, part in item.boxes:
                expected = whole[name][box.slices]
                if part.numel():
                    self._tensor(kind, name, step, part, expected, scale[name])

    def _tensor(self, kind: str, name: str, step: int, actual: Tensor, expected: Tensor, scale: float) -> None:
        relative = largest_difference(expected, actual) / scale
        if not self._counts(kind, relative):
            return
        ratio = least_squares_ratio(expected, actual)
        found = Mismatch(self.run, kind, name, step, relative, ratio)
        if kind == "gradient" and self.evidence_step in (None, step):
            self.evidence_step = step
            found = Mismatch(
                *(self.run, kind, name, step, relative, ratio),
                actual=actual.clone(),
                expected=expected.clone(),
                placement=self.placements.get(name),
            )
        self.report.mismatches.append(found)

    def _counts(self, kind: str, relative: float) -> bool:
        """Note a difference, and say whether it is more than rounding; what is not a number is."""
        fails = not relative <= self.tolerance
        self.worst[kind] = max(self.worst[kind], relative if relative == relative else float("inf"))
        return fails


def _compare_steps(training: Training, steps: int, reference: Trace, comparison: Comparison) -> None:
    for step in range(steps):

        def on_gradients(step: int = step) -> None:
            comparison.tensors("gradient", step, training.gradient_items(), reference.gradients[step])

        outcome = training.step(step, on_gradients)
        comparison.scalar("loss", step, as_number(outcome.loss), reference.losses[step])
        comparison.scalar("norm", step, as_number(outcome.grad_norm), reference.norms[step])
        comparison.tensors("weight", step, training.weight_items(), reference.weights[step])


def reference_modules(config: TrainConfig, dataset: Dataset, samples: Sequence[int]) -> dict[int, ModuleTrace]:
    """What every module did on one rank, for the microbatches that begin with these samples."""
    training = prepared(config, Mesh.single(), dataset)
    tracer = ModuleTracer(training.stages, samples)
    seed_reference()
    training.step(0)
    return tracer.traces


def probe_modules(
    config: TrainConfig, dataset: Dataset, blamed: Collection[str], tolerance: float
) -> dict[str, Probed]:
    """Call again, on one rank, the modules whose class is not the package's and the blamed modules."""
    training = prepared(config, Mesh.single(), dataset)
    modules = named_modules(training)
    prober = Prober(to_probe(modules, blamed), tolerance)
    seed_reference()
    training.step(0)
    return prober.found


def to_probe(modules: Mapping[str, nn.Module], blamed: Collection[str]) -> dict[str, nn.Module]:
    """The modules to probe: those whose class is not the package's, and the blamed ones."""
    return {name: x for name, x in modules.items() if name in blamed or not is_packaged(x)}


def blame_modules(
    config: TrainConfig, dataset: Dataset, references: Mapping[int, ModuleTrace], tolerance: float
) -> RankDeviations:
    """The modules at fault on a layout, from its first microbatches; all ranks come to the same ones.

    Raises:
        ModuleFailed: a module's call raised.
    """
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = prepared(config, mesh, dataset)
    placements = stage_placements(training.stages)
    modules = named_modules(training)
    classes = Classes.of(modules)
    samples = first_samples(config, mesh.coordinates[Axis.DP], mesh.shape.dp)
    tracer = ModuleTracer(training.stages, samples)
    seed_rank(mesh)
    try:
        training.step(0)
    except Exception as error:
        raise _module_failed(modules, classes, tracer, references, samples) from error
    traces = [(references[sample], tracer.traces[sample]) for sample in samples]
    errors, everywhere = find_deviations(mesh, classes, traces, tolerance)
    vectors = {
        name: x
        for name, x in tracer.recorder.vectors.items()
        if name in placements and Axis.TP not in placements[name].shards
    }
    return RankDeviations(dict(mesh.coordinates), errors, vectors, everywhere)


def _module_failed(
    modules: Mapping[str, nn.Module],
    classes: Classes,
    tracer: ModuleTracer,
    references: Mapping[int, ModuleTrace],
    samples: Sequence[int],
) -> ModuleFailed:
    """The innermost running module of a class of the user's, or the one that gave a tensor of a wrong shape."""
    composed = {name for name, module in modules.items() if any(True for _ in module.children())}
    for sample in samples:
        if reshaped := find_reshaped(references[sample], tracer.traces[sample], composed):
            name, taken, given = reshaped
            cause = f"{name} gives {given} for an input of {taken}; on one rank they are of one shape"
            return ModuleFailed(name, classes.owner_class(name) or "", cause)
    running = tracer.recorder.running
    own = next((name for name in reversed(running) if name in classes.own), None)
    name = own if own is not None else next(reversed(running), "")
    return ModuleFailed(name, classes.owner_class(name) or "", "")


def named_modules(training: Training) -> dict[str, nn.Module]:
    """The modules of this rank's stages by global name, the stages themselves left out."""
    return {name: module for stage in training.stages for name, module in stage.named_modules() if name}


def first_samples(config: TrainConfig, dp_rank: int, dp: int) -> list[int]:
    """The global number of the first sample of each watched microbatch of a data-parallel coordinate."""
    micro = config.batch.micro_size
    count = min(WATCHED, config.batch.global_size // (micro * dp))
    return [(at * dp + dp_rank) * micro for at in range(count)]
