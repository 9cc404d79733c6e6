"""``assert_parity``: assert that a parallel layer computes the same on a mesh as on one rank.

A factory builds the layer on a mesh. The layer is initialised by global name, its constant initial values are perturbed
(a bias of zero hides a bias that is added once too often), and it is trained for a few steps on the same global input.
Outputs, input gradients, parameter gradients, their norm and the weights must agree by the metric of
:mod:`megastack.testing.compare`, and replicas must stay identical.

If they do not, the layer runs again with every module traced, on one rank and on the mesh, and the error names the
class at fault and the likely cause, like ``megastack verify``. On one rank the rows of each data-parallel rank run
separately, and then all rows at once, which reveals an output that depends on other rows.

Example::

    def my_mlp(mesh: Mesh) -> ParallelMLP:
        return ParallelMLP(16, 32, mesh)

    assert_parity(my_mlp, MeshShape(dp=2, tp=2))
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from megastack.errors import MeshError
from megastack.gradients.norm import grad_norm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import DENSE_AXES, Axis, MeshShape
from megastack.testing.compare import INPUT_GRADIENT, TOLERANCES, RankComparison, RankReport, Trace, differences
from megastack.testing.diagnose import Evidence, diagnose
from megastack.testing.finding import Finding, finding_text
from megastack.testing.layer_training import Factory, LayerTraining, TrainingSpec, trace_layer
from megastack.testing.localize import (
    ModuleClasses,
    RankDeviations,
    agreements,
    find_deviations,
    localize_forward,
    merge_agreements,
)
from megastack.testing.module_trace import CallRecorder, ModuleTrace, TPRank
from megastack.testing.perturb import perturb_ as perturb_
from megastack.testing.purity import ModuleCheck, PurityChecker, impure_modules, modules_to_check, seed_generators
from megastack.testing.ranks import RankFailure, run_ranks


def assert_parity(
    factory: Factory,
    shape: MeshShape,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "sgd",
    sequence_parallel: bool = False,
    batch: int = 4,
    sequence: int = 8,
    hidden: int | None = None,
    timeout: float = 60,
) -> None:
    """Assert that a layer trained on ``shape`` equals the same layer trained on one rank.

    Args:
        factory: builds the layer on a mesh; its forward maps (B, S, D) to (B, S, D). Any callable works, lambdas,
            closures and local classes included, since new ranks are forked and inherit it.
        shape: the mesh, with ``dp`` and ``tp``; ``pp`` and ``cp`` are 1.
        steps: optimizer steps.
        dtype: fp64 is compared to 1e-10, fp32 to 1e-5.
        optimizer: ``sgd`` or ``adamw``.
        sequence_parallel: whether input and output of the layer are sequence shards (B, S/t, D).
        batch: global batch, a multiple of ``dp``.
        sequence: S, a multiple of ``tp`` under sequence parallelism.
        hidden: D; by default the last dim of the first parameter that is called ``weight``.
        timeout: seconds after which the ranks are killed.

    Raises:
        AssertionError: lists everything that differs, by how much and by which factor, with the class at fault and the
            likely cause.
        MeshError: the shape has a pipeline or context axis, or does not divide the batch or the sequence.
        RankFailure: the layer does not run.
    """
    _check_shape(shape, batch, sequence if sequence_parallel else shape.tp)
    spec = TrainingSpec(steps, dtype, optimizer, sequence_parallel, batch, sequence, hidden)
    reference = run_ranks(lambda: _trace(factory, MeshShape(), spec), 1, timeout=timeout)[0]
    trace = run_ranks(lambda: _trace(factory, shape, spec), shape.world_size, timeout=timeout)[0]
    assert reference is not None and trace is not None
    adam_fp32 = optimizer == "adamw" and dtype == torch.float32
    found = differences(reference, trace, tolerance=TOLERANCES[dtype], adam_fp32=adam_fp32)
    if found:
        lines = [f"the layer on {shape} does not match one rank", *map(str, found)]
        finding = find_cause(factory, shape, spec, timeout=timeout)
        raise AssertionError("\n".join([*lines, *([finding_text(finding)] if finding else [])]))


def _check_shape(shape: MeshShape, batch: int, sequence: int) -> None:
    if shape.pp > 1 or shape.cp > 1:
        raise MeshError(f"{shape}: a single layer has no pipeline or context axis; use dp and tp")
    for name, size, degree in (("batch", batch, shape.dp), ("sequence", sequence, shape.tp)):
        if size % degree:
            raise MeshError(f"{name}={size}: must be a multiple of {degree}, its number of parts on {shape}")


def _trace(factory: Factory, shape: MeshShape, spec: TrainingSpec) -> Trace | None:
    """The trace of the layer on a mesh, on its first rank."""
    return trace_layer(_seeded(factory, Mesh.from_environment(shape, device="cpu"), spec))


def _seeded(factory: Factory, mesh: Mesh, spec: TrainingSpec) -> LayerTraining:
    """The layer with generators seeded differently from the reference, so that draws do not agree by chance."""
    training = LayerTraining(factory, mesh, spec)
    seed_generators(0 if mesh.shape.world_size == 1 else 1 + mesh.rank)
    return training


def find_cause(factory: Factory, shape: MeshShape, spec: TrainingSpec, *, timeout: float) -> Finding | None:
    """The first wrong module or number of a layer, in fp64 if the layer supports it; None if undetermined."""
    for dtype in dict.fromkeys((torch.float64, spec.dtype)):  # a layer may have buffers of a fixed dtype
        try:
            return _Diagnosis(factory, shape, replace(spec, dtype=dtype), timeout).finding()
        except RankFailure:
            continue
    return None


class _Diagnosis:
    """Collects the evidence about a layer that differs."""

    def __init__(self, factory: Factory, shape: MeshShape, spec: TrainingSpec, timeout: float) -> None:
        self.factory, self.shape, self.spec, self.timeout = factory, shape, spec, timeout

    def finding(self) -> Finding | None:
        factory, shape, spec = self.factory, self.shape, self.spec
        reference, names = run_ranks(lambda: _reference(factory, spec), 1, timeout=self.timeout)[0]
        parts = run_ranks(lambda: _trace_parts(factory, spec, shape.dp), 1, timeout=self.timeout)[0]
        by_rank = run_ranks(
            lambda: _compare_on_rank(factory, shape, spec, reference, parts), shape.world_size, timeout=self.timeout
        )
        reports, deviations = [report for report, _ in by_rank], [found for _, found in by_rank]
        faulty = {name for rank in deviations for d in rank.deviations for name in (d.faulty.module, d.faulty.first)}
        degrees = {axis.value: shape.size(axis) for axis in DENSE_AXES}
        evidence = Evidence(names, degrees, deviations, self._impure(faulty))
        finding = diagnose(reports, evidence)
        if finding is None or finding.kind != "module":
            finding = self._find_row_mixing(parts, evidence) or finding
        return finding or self._impurity(evidence)

    def _impure(self, faulty: Collection[str]) -> dict[str, str]:
        factory, spec = self.factory, self.spec
        try:
            runs = [
                run_ranks(lambda: _check_purity(factory, spec, faulty), 1, timeout=self.timeout)[0] for _ in range(2)
            ]
        except RankFailure:
            return {}
        return impure_modules(runs, TOLERANCES[spec.dtype])

    def _find_row_mixing(self, parts: list[ModuleTrace], evidence: Evidence) -> Finding | None:
        """The module whose output for some rows depends on rows of other data-parallel ranks."""
        if len(parts) == 1 or evidence.impure:
            return None
        factory, spec, classes = self.factory, self.spec, evidence.classes
        (whole,) = run_ranks(lambda: _trace_parts(factory, spec, 1), 1, timeout=self.timeout)[0]
        found = [
            agreements(whole, part, TPRank(at, len(parts)), TOLERANCES[spec.dtype]) for at, part in enumerate(parts)
        ]
        faulty = localize_forward(merge_agreements(found, list(whole)), classes)
        if faulty is None:
            return None
        cause = (
            f"{classes.label(faulty.module)} mixes samples of the batch: on one rank already, its output for some rows "
            "depends on other rows, which dp places on other ranks"
        )
        return Finding("module", faulty.module, cause=cause, owner=classes.responsible_class(faulty.module))

    @staticmethod
    def _impurity(evidence: Evidence) -> Finding | None:
        for name, why in evidence.impure.items():
            classes = evidence.classes
            cause = f"{classes.label(name)} {why}"
            return Finding("loss", "", cause=cause, module=name, owner=classes.responsible_class(name))
        return None


def _reference(factory: Factory, spec: TrainingSpec) -> tuple[Trace, list[str]]:
    """The training on one rank, and the names of its gradients: the input's and the parameters', in order."""
    training = _seeded(factory, Mesh.single(), spec)
    trace = trace_layer(training)
    assert trace is not None
    return trace, [INPUT_GRADIENT, *training.placements]


def _trace_parts(factory: Factory, spec: TrainingSpec, parts: int) -> list[ModuleTrace]:
    """The module traces on one rank, one for each of the equal parts of the batch."""
    training = _seeded(factory, Mesh.single(), spec)
    recorder = CallRecorder(training.layer.named_modules())
    traces: list[ModuleTrace] = []
    for x, weights in zip(training.inputs(0).chunk(parts), training.weights(0).chunk(parts), strict=True):
        traces.append({})
        recorder.trace = traces[-1]
        training.loss(training.layer(x.clone().requires_grad_()), weights).backward()
    return traces


def _compare_on_rank(
    factory: Factory, shape: MeshShape, spec: TrainingSpec, reference: Trace, parts: list[ModuleTrace]
) -> tuple[RankReport, RankDeviations]:
    """The differences from the reference on a rank of the mesh, and the modules at fault."""
    mesh = Mesh.from_environment(shape, device="cpu")
    training = _seeded(factory, mesh, spec)
    report = RankReport(dict(mesh.coordinates))
    comparison = RankComparison(spec.optimizer, training.placements, TOLERANCES[spec.dtype], report)
    modules = dict(training.layer.named_modules())
    recorder, trace = CallRecorder(modules.items()), ModuleTrace()
    for step in range(spec.steps):
        recorder.trace = None if step else trace
        result = training.step(step)
        input_gradient = [item for item in training.activation_items(result) if item.name.endswith(INPUT_GRADIENT)]
        gradients = [*training.gradient_items(), *input_gradient]
        comparison.tensors("gradient", step, gradients, reference.gradients[step])
        comparison.scalar("norm", step, float(grad_norm(training.buckets, mesh)), reference.norms[step])
        training.update()
    pairs = [(parts[mesh.coordinates[Axis.DP]], trace)]
    deviations, classes = find_deviations(mesh, ModuleClasses.of(modules), pairs, TOLERANCES[spec.dtype])
    vectors = recorder.replicated_vectors(training.placements)
    return report, RankDeviations(dict(mesh.coordinates), deviations, vectors, classes)


def _check_purity(factory: Factory, spec: TrainingSpec, faulty: Collection[str]) -> dict[str, ModuleCheck]:
    training = _seeded(factory, Mesh.single(), spec)
    checker = PurityChecker(modules_to_check(dict(training.layer.named_modules()), faulty), TOLERANCES[spec.dtype])
    training.layer(training.inputs(0).requires_grad_())
    return checker.checked
