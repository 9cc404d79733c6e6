"""Why a single layer differs on a mesh: the same evidence as ``megastack verify`` collects, in fp64.

The layer runs one step more with every module watched, on one rank and on the mesh. On one rank it takes the rows of
each data-parallel coordinate by themselves, and all rows at once: an output that depends on the other rows is right
nowhere but there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megastack.gradients.norm import grad_norm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import DENSE_AXES, Axis, MeshShape
from megastack.testing.blame import Classes, RankDeviations, agreements, blame_forward, find_deviations, merge
from megastack.testing.compare import TOLERANCES, Trace
from megastack.testing.diagnose import Evidence, Finding, diagnose
from megastack.testing.layer_training import INPUT_GRADIENT, Factory, LayerTraining, Task, trace_layer
from megastack.testing.module_trace import ModuleTrace, Place, Recorder
from megastack.testing.on_ranks import Comparison, RankReport, to_probe
from megastack.testing.probes import Probed, Prober, reasons, seed_generators
from megastack.testing.ranks import RankFailure, run_ranks


def find_cause(factory: Factory, shape: MeshShape, task: Task, *, timeout: float) -> Finding | None:
    """The first fault of a layer, as far as it can be determined; None otherwise."""
    for dtype in dict.fromkeys((torch.float64, task.dtype)):  # a layer may have buffers of a dtype of their own
        try:
            return _Search(factory, shape, replace(task, dtype=dtype), timeout).finding()
        except RankFailure:
            continue
    return None


class _Search:
    def __init__(self, factory: Factory, shape: MeshShape, task: Task, timeout: float) -> None:
        self.factory, self.shape, self.task, self.timeout = factory, shape, task, timeout

    def finding(self) -> Finding | None:
        factory, shape, task = self.factory, self.shape, self.task
        alone, names = run_ranks(lambda: _reference(factory, task), 1, timeout=self.timeout)[0]
        parts = run_ranks(lambda: _trace_parts(factory, task, shape.dp), 1, timeout=self.timeout)[0]
        on_ranks = run_ranks(lambda: _watch(factory, shape, task, alone, parts), shape.world_size, timeout=self.timeout)
        reports, errors = [report for report, _ in on_ranks], [found for _, found in on_ranks]
        blamed = {name for rank in errors for f in rank.errors for name in (f.blame.module, f.blame.first)}
        degrees = {axis.value: shape.size(axis) for axis in DENSE_AXES}
        evidence = Evidence(names, degrees, errors, self._unstable(blamed))
        finding = diagnose(reports, evidence)
        if finding is None or finding.kind != "module":
            finding = self._mixing(parts, evidence) or finding
        return finding or self._suspect(evidence)

    def _unstable(self, blamed: Collection[str]) -> dict[str, str]:
        factory, task = self.factory, self.task
        try:
            runs = [run_ranks(lambda: _probe(factory, task, blamed), 1, timeout=self.timeout)[0] for _ in range(2)]
        except RankFailure:
            return {}
        return reasons(runs, TOLERANCES[task.dtype])

    def _mixing(self, parts: list[ModuleTrace], evidence: Evidence) -> Finding | None:
        """The module whose output for some rows depends on other rows, which another rank has."""
        if len(parts) == 1 or evidence.unstable:
            return None
        factory, task, classes = self.factory, self.task, evidence.classes
        (whole,) = run_ranks(lambda: _trace_parts(factory, task, 1), 1, timeout=self.timeout)[0]
        found = [
            agreements(whole, part, Place(at, len(parts)), TOLERANCES[task.dtype]) for at, part in enumerate(parts)
        ]
        blame = blame_forward(merge(found, list(whole)), classes)
        if blame is None:
            return None
        cause = (
            f"{classes.label(blame.module)} mixes samples of the batch: on one rank already, its output for some rows "
            "depends on the others, and dp gives these to other ranks"
        )
        return Finding("module", blame.module, cause=cause, owner=classes.owner_class(blame.module))

    @staticmethod
    def _suspect(evidence: Evidence) -> Finding | None:
        for name, why in evidence.unstable.items():
            classes = evidence.classes
            cause = f"{classes.label(name)} {why}"
            return Finding("loss", "", cause=cause, module=name, owner=classes.owner_class(name))
        return None


def _seeded(factory: Factory, mesh: Mesh, task: Task) -> LayerTraining:
    training = LayerTraining(factory, mesh, task)
    seed_generators(0 if mesh.shape.world_size == 1 else 1 + mesh.rank)
    return training


def _reference(factory: Factory, task: Task) -> tuple[Trace, list[str]]:
    """The training on one rank, and what has a gradient: the input, and the parameters in the order of the layer."""
    training = _seeded(factory, Mesh.single(), task)
    trace = trace_layer(training)
    assert trace is not None
    return trace, [INPUT_GRADIENT, *training.placements]


def _trace_parts(factory: Factory, task: Task, parts: int) -> list[ModuleTrace]:
    """What every module does on one rank with each of the equal parts of the batch."""
    training = _seeded(factory, Mesh.single(), task)
    recorder = Recorder(training.layer.named_modules())
    traces: list[ModuleTrace] = []
    for x, weights in zip(training.inputs(0).chunk(parts), training.weights(0).chunk(parts), strict=True):
        traces.append({})
        recorder.trace = traces[-1]
        training.loss(training.layer(x.clone().requires_grad_()), weights).backward()
    return traces


def _watch(
    factory: Factory, shape: MeshShape, task: Task, alone: Trace, parts: list[ModuleTrace]
) -> tuple[RankReport, RankDeviations]:
    """On a rank of the mesh: what differs from the reference, and the modules at fault."""
    mesh = Mesh.from_environment(shape, device="cpu")
    training = _seeded(factory, mesh, task)
    report = RankReport(dict(mesh.coordinates))
    comparison = Comparison(task.optimizer, training.placements, TOLERANCES[task.dtype], report)
    modules = dict(training.layer.named_modules())
    recorder, trace = Recorder(modules.items()), ModuleTrace()
    for step in range(task.steps):
        recorder.trace = None if step else trace
        stepped = training.step(step)
        seen = [item for item in training.seen_items(stepped) if item.name.endswith(INPUT_GRADIENT)]
        comparison.tensors("gradient", step, [*training.gradient_items(), *seen], alone.gradients[step])
        comparison.scalar("norm", step, float(grad_norm(training.buckets, mesh)), alone.norms[step])
        training.update()
    pairs = [(parts[mesh.coordinates[Axis.DP]], trace)]
    errors, classes = find_deviations(mesh, Classes.of(modules), pairs, TOLERANCES[task.dtype])
    return report, RankDeviations(dict(mesh.coordinates), errors, _replicated(recorder.vectors, training), classes)


def _replicated(vectors: Mapping[str, Tensor], training: LayerTraining) -> dict[str, Tensor]:
    return {
        name: x
        for name, x in vectors.items()
        if name in training.placements and Axis.TP not in training.placements[name].shards
    }


def _probe(factory: Factory, task: Task, blamed: Collection[str]) -> dict[str, Probed]:
    training = _seeded(factory, Mesh.single(), task)
    prober = Prober(to_probe(dict(training.layer.named_modules()), blamed), TOLERANCES[task.dtype])
    training.layer(training.inputs(0).requires_grad_())
    return prober.found
