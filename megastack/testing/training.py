"""A configuration trained for a few steps on a layout: its trace, its comparison with one rank, and module traces.

A trace is gathered on the first rank. Verifying a layout gathers nothing: every rank knows the whole reference (forked
ranks inherit it), compares its own parts with the same parts of the reference, and returns the differences.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from megastack.assemble.training import Training, build_training
from megastack.checkpoint.state import stage_placements
from megastack.config.compose import compose
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import MegastackError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.buffers import persistent_buffers
from megastack.testing.compare import TOLERANCES, Difference, RankComparison, RankReport, Trace, differences
from megastack.testing.gather import gather_whole
from megastack.testing.localize import ModuleClasses, RankDeviations, find_deviations
from megastack.testing.module_trace import ModuleTrace, ModuleTracer, find_reshaped
from megastack.testing.perturb import perturb_items_
from megastack.testing.purity import ModuleCheck, PurityChecker, modules_to_check, seed_generators
from megastack.testing.ranks import run_ranks

TRACED_MICROBATCHES = 4
"""The maximum number of microbatches of each rank whose modules are traced."""


class ModuleFailed(MegastackError):
    """A module's call raised; the arguments are its name, its class, and the cause (empty if unknown)."""


def trace_training(training: Training, steps: int) -> Trace:
    """Run the first steps. Must be called on all ranks.

    Returns:
        Losses and norms on every rank; gradients and weights on the first rank only.
    """
    mesh = training.mesh
    trace = Trace(gather_whole(training.weight_items(), mesh)[0])
    for step in range(steps):
        outcome = training.step(step, lambda: trace.add_gradients(*gather_whole(training.gradient_items(), mesh)))
        if outcome.loss is None:  # no valid label, so no gradients either
            trace.add_gradients({}, {})
        trace.losses.append(as_number(outcome.loss))
        trace.norms.append(as_number(outcome.grad_norm))
        trace.rates.append(outcome.lr)
        trace.add_weights(*gather_whole(training.weight_items(), mesh))
    return trace


def as_number(value: Tensor | None) -> float:
    """A scalar of a step; 0 for a step without a valid label, on every layout."""
    return 0.0 if value is None else float(value)


def trace_layout(config: TrainConfig, steps: int, *, dataset: Dataset | None = None, timeout: float = 120) -> Trace:
    """The trace of a configuration on its own layout, on forked ranks of this machine.

    Args:
        config: a valid configuration.
        steps: optimizer steps.
        dataset: its data, if already read.
        timeout: seconds after which the ranks are killed.
    """
    world = mesh_shape(config).world_size
    trace = run_ranks(_trace_on_rank, world, config, steps, dataset, timeout=timeout)[0]
    assert trace is not None
    return trace


def _trace_on_rank(config: TrainConfig, steps: int, dataset: Dataset | None) -> Trace | None:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    trace = trace_training(build_training(config, mesh, dataset), steps)
    return trace if mesh.rank == 0 else None


def layout_differences(
    reference: Trace, config: TrainConfig, steps: int, *, dataset: Dataset | None = None
) -> list[Difference]:
    """The differences between a reference trace and the training of ``config``, beyond the tolerance."""
    dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    adam_fp32 = config.optim.name == "adamw" and dtype == torch.float32
    trace = trace_layout(config, steps, dataset=dataset)
    return differences(reference, trace, tolerance=TOLERANCES[dtype], adam_fp32=adam_fp32)


def composed(*overrides: str | Sequence[str]) -> TrainConfig:
    """A configuration from overrides and lists of overrides."""
    flat = [item for part in overrides for item in ([part] if isinstance(part, str) else part)]
    return compose(flat)


def build_perturbed(config: TrainConfig, mesh: Mesh, dataset: Dataset) -> Training:
    """A training run whose constant initial parameters are perturbed: a bias of zero hides errors in its use."""
    training = build_training(config, mesh, dataset)
    perturb_items_(training.weight_items(), stage_placements(training.stages))
    training.step.optimizer.copy_model_to_main()
    return training


def seed_rank(mesh: Mesh) -> None:
    """Seed the process's generators differently from the reference, so that draws from them do not agree by chance."""
    seed_generators(1 + mesh.rank)


def seed_reference() -> None:
    """Seed the generators of the reference."""
    seed_generators(0)


def reference_traces(runs: Mapping[str, TrainConfig], steps: int, dataset: Dataset) -> dict[str, Trace]:
    """The trace of the first steps on one rank, by run."""
    mesh = Mesh.single()
    traces = {}
    for run, config in runs.items():
        training = build_perturbed(config, mesh, dataset)
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
    """Train a layout and compare everything that this rank holds with the reference."""
    mesh = Mesh.from_environment(mesh_shape(next(iter(runs.values()))), device="cpu")
    report = RankReport(dict(mesh.coordinates))
    for run, config in runs.items():
        training = build_perturbed(config, mesh, dataset)
        seed_rank(mesh)
        report.buffers |= {name for stage in training.stages for name in persistent_buffers(stage)}
        comparison = RankComparison(run, stage_placements(training.stages), tolerance, report)
        _compare_steps(training, steps, references[run], comparison)
    return report


def _compare_steps(training: Training, steps: int, reference: Trace, comparison: RankComparison) -> None:
    for step in range(steps):

        def on_gradients(step: int = step) -> None:
            comparison.tensors("gradient", step, training.gradient_items(), reference.gradients[step])

        outcome = training.step(step, on_gradients)
        comparison.scalar("loss", step, as_number(outcome.loss), reference.losses[step])
        comparison.scalar("norm", step, as_number(outcome.grad_norm), reference.norms[step])
        comparison.tensors("weight", step, training.weight_items(), reference.weights[step])


def reference_modules(config: TrainConfig, dataset: Dataset, samples: Sequence[int]) -> dict[int, ModuleTrace]:
    """The module traces on one rank, for the microbatches that begin with these samples."""
    training = build_perturbed(config, Mesh.single(), dataset)
    tracer = ModuleTracer(training.stages, samples)
    seed_reference()
    training.step(0)
    return tracer.traces


def check_purity(
    config: TrainConfig, dataset: Dataset, faulty: Collection[str], tolerance: float
) -> dict[str, ModuleCheck]:
    """Call modules again on one rank: the ``faulty`` ones, and those whose class does not belong to the package."""
    training = build_perturbed(config, Mesh.single(), dataset)
    checker = PurityChecker(modules_to_check(named_modules(training), faulty), tolerance)
    seed_reference()
    training.step(0)
    return checker.checked


def localize_faults(
    config: TrainConfig, dataset: Dataset, references: Mapping[int, ModuleTrace], tolerance: float
) -> RankDeviations:
    """The modules at fault on a layout in its first microbatches; all ranks find the same ones.

    Raises:
        ModuleFailed: a module's call raised.
    """
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_perturbed(config, mesh, dataset)
    placements = stage_placements(training.stages)
    modules = named_modules(training)
    classes = ModuleClasses.of(modules)
    samples = first_samples(config, mesh.coordinates[Axis.DP], mesh.shape.dp)
    tracer = ModuleTracer(training.stages, samples)
    seed_rank(mesh)
    try:
        training.step(0)
    except Exception as error:
        raise _module_failed(modules, classes, tracer, references, samples) from error
    traces = [(references[sample], tracer.traces[sample]) for sample in samples]
    deviations, everywhere = find_deviations(mesh, classes, traces, tolerance)
    vectors = tracer.recorder.replicated_vectors(placements)
    return RankDeviations(dict(mesh.coordinates), deviations, vectors, everywhere)


def _module_failed(
    modules: Mapping[str, nn.Module],
    classes: ModuleClasses,
    tracer: ModuleTracer,
    references: Mapping[int, ModuleTrace],
    samples: Sequence[int],
) -> ModuleFailed:
    """The module that returned a tensor of a wrong shape, or else the innermost running user-defined module."""
    composed = {name for name, module in modules.items() if any(True for _ in module.children())}
    for sample in samples:
        if reshaped := find_reshaped(references[sample], tracer.traces[sample], composed):
            name, input_shape, output_shape = reshaped
            cause = f"{name} returns {output_shape} for an input of {input_shape}; on one rank the shapes are equal"
            return ModuleFailed(name, classes.responsible_class(name) or "", cause)
    running = tracer.recorder.running
    user = next((name for name in reversed(running) if name in classes.user), None)
    name = user if user is not None else next(reversed(running), "")
    return ModuleFailed(name, classes.responsible_class(name) or "", "")


def named_modules(training: Training) -> dict[str, nn.Module]:
    """The modules of this rank's stages by global name, without the stages themselves."""
    return {name: module for stage in training.stages for name, module in stage.named_modules() if name}


def first_samples(config: TrainConfig, dp_rank: int, dp: int) -> list[int]:
    """The global number of the first sample of each traced microbatch of a data-parallel rank."""
    micro = config.batch.micro_size
    count = min(TRACED_MICROBATCHES, config.batch.global_size // (micro * dp))
    return [(at * dp + dp_rank) * micro for at in range(count)]
