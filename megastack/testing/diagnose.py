"""Diagnosis: from the differences on all ranks to one finding, the first wrong module or parameter, and its cause.

Order matters, since errors propagate: a wrong forward makes every gradient wrong, and a wrong gradient every later
weight. A module at fault in the forward pass therefore comes first, then the first wrong gradient in the backward pass,
then everything else.

A cause is named only if the numbers show it. Two wrong declarations leave a signature on a gradient: if a partial
gradient is not declared, the ranks differ and their sum is the reference; if a complete gradient is declared partial,
it is exactly t times the reference. Forward errors leave signatures too: a missing sum, one sum too many, a bias that
every rank added before the sum. All of this is arithmetic on tensors that were collected before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megastack.mesh.shape import DENSE_AXES, Axis
from megastack.placement.placement import Placement
from megastack.testing.compare import Mismatch, RankReport
from megastack.testing.finding import Finding, Held
from megastack.testing.localize import Deviation, ModuleClasses, RankDeviations, Side, is_within

CLOSE = 1e-7
"""How closely numbers must match a signature, relative to the largest element."""
OWN_CODE = (
    "its inputs match the reference on every rank, so the error is in its own code: it depends on the rank, or treats "
    "this rank's part (an index, a size, a mean, the rows of a parameter) as the whole"
)
"""The cause of a wrong output if the module is pure and no signature matches."""
BUFFER = (
    "it is probably updated from this rank's data alone; reduce what updates it, for example with "
    "megastack.comm.collectives.all_reduce"
)
RankMismatch = tuple[RankReport, Mismatch]


@dataclass(frozen=True)
class Evidence:
    """Facts about a layout besides the results of its training run.

    Attributes:
        names: all parameters and buffers in the order of their use.
        degrees: the degrees of the axes.
        deviations: the modules at fault, by rank; empty if they could not be determined.
        impure: modules whose output depends on more than their input, even on one rank, and what it depends on.
    """

    names: Sequence[str]
    degrees: Mapping[str, int]
    deviations: Sequence[RankDeviations] = ()
    impure: Mapping[str, str] = field(default_factory=dict)

    @property
    def classes(self) -> ModuleClasses:
        """The classes of all modules."""
        return self.deviations[0].classes if self.deviations else ModuleClasses({})

    def impurity(self, module: str) -> str | None:
        """Describe why a module, or the first impure module inside it, is not pure; None if all are."""
        found = next(((name, why) for name, why in self.impure.items() if is_within(name, module)), None)
        if found is None:
            return None
        name, why = found
        return f"{'it' if name == module else self.classes.label(name)} {why}"


def diagnose(reports: Sequence[RankReport], evidence: Evidence) -> Finding | None:
    """Find the first wrong module or number on a layout.

    Args:
        reports: the reports of all ranks.
        evidence: further facts.

    Returns:
        None if neither a module nor a number is wrong.
    """
    finding = _first_finding(reports, evidence)
    if finding is None:
        return None
    if finding.cause is None and finding.module is None and finding.kind != "module":
        finding = _blame_impure_module(finding, evidence)
    if finding.cause is None and finding.held == "buffer":
        finding = replace(finding, cause=BUFFER)
    module = finding.module
    if module is None:
        module = finding.name if finding.kind == "module" else finding.name.rpartition(".")[0]
    has_module = finding.module is not None or finding.kind == "module" or bool(finding.name)
    return replace(finding, owner=evidence.classes.responsible_class(module) if has_module else None)


def _blame_impure_module(finding: Finding, evidence: Evidence) -> Finding:
    """Explain a finding without a cause by an impure module, if there is one; a gradient by its own module only."""
    owner = finding.name.rpartition(".")[0]
    related = (
        name
        for name in evidence.impure
        if finding.kind != "gradient" or is_within(owner, name) or is_within(name, owner)
    )
    module = next(related, None)
    if module is None:
        return finding
    return replace(finding, module=module, cause=f"{evidence.classes.label(module)} {evidence.impure[module]}")


def _first_finding(reports: Sequence[RankReport], evidence: Evidence) -> Finding | None:
    forward = _largest_deviation(evidence.deviations, "forward")
    if forward is not None:
        return _module_finding(forward, evidence)
    found = [(report, m) for report in reports for m in report.mismatches]
    if not found:
        return None
    first = min(m.step for _, m in found)
    found = [(report, m) for report, m in found if m.step == first]
    found = [(report, m) for report, m in found if m.run == found[0][1].run]
    gradients = [(report, m) for report, m in found if m.kind == "gradient"]
    if gradients and not any(m.kind == "loss" for _, m in found):
        return _gradient_finding(gradients, reports, evidence)
    worst = max((m for _, m in found), key=lambda m: (m.kind == "loss", m.kind == "norm", m.relative))
    scalar = worst.kind in ("loss", "norm")
    cause = factor_cause([worst.ratio], evidence.degrees) if scalar else None
    also = tuple(sorted({m.name for _, m in found if m.name and m.name != worst.name}))
    held: Held = "trained" if scalar else _held(worst.name, reports)
    return Finding(worst.kind, worst.name, first, worst.relative, worst.ratio, cause, also=also, held=held)


def _held(name: str, reports: Sequence[RankReport]) -> Held:
    """Whether ``name`` is a trained parameter, a frozen parameter or a buffer."""
    if any(name in report.buffers for report in reports):
        return "buffer"
    return "trained" if any(name in report.trained for report in reports) else "frozen"


def _largest_deviation(ranks: Sequence[RankDeviations], side: Side) -> Deviation | None:
    """The deviation in the forward or backward pass, from the rank where it is largest."""
    found = [deviation for rank in ranks for deviation in rank.deviations if deviation.faulty.side == side]
    return max(found, key=lambda deviation: deviation.relative, default=None)


def _module_finding(deviation: Deviation, evidence: Evidence) -> Finding:
    faulty, classes = deviation.faulty, evidence.classes
    where = ""
    if faulty.first != faulty.module:
        where = f"; inside it, {classes.label(faulty.first)} differs first"
    elif faulty.misfed is not None:
        where = f"; the input that it passes to {classes.label(faulty.misfed)} differs already"
    impurity = evidence.impurity(faulty.module)
    if impurity is not None or not faulty.proven:
        return Finding("module", faulty.module, 0, deviation.relative, cause=impurity)
    group, per_rank, expected = _tensor_group(deviation, evidence.deviations)
    vectors = {name: x for rank in group[:1] for name, x in rank.vectors.items() if is_within(name, faulty.module)}
    cause = output_cause(per_rank, expected, vectors) or OWN_CODE
    return Finding("module", faulty.module, 0, deviation.relative, cause=cause + where)


def _tensor_group(
    deviation: Deviation, ranks: Sequence[RankDeviations]
) -> tuple[list[RankDeviations], list[Tensor], list[Tensor]]:
    """The tensor-parallel group of a deviation, and its actual and expected values of the worst tensor."""
    seeing = next(rank for rank in ranks if any(each is deviation for each in rank.deviations))
    group = [rank for rank in ranks if _same_tp_group(rank.coordinates, seeing.coordinates)]
    group.sort(key=lambda rank: rank.coordinates[Axis.TP])
    key = max(deviation.tensors, key=lambda key: deviation.tensors[key].relative)
    by_rank = [
        next((each.tensors.get(key) for each in rank.deviations if each.faulty == deviation.faulty), None)
        for rank in group
    ]
    compared = [tensor for tensor in by_rank if tensor is not None]
    return group, [tensor.actual for tensor in compared], [tensor.expected for tensor in compared]


def _same_tp_group(a: Mapping[Axis, int], b: Mapping[Axis, int]) -> bool:
    return all(a[axis] == b[axis] for axis in DENSE_AXES if axis != Axis.TP)


def _gradient_finding(gradients: Sequence[RankMismatch], reports: Sequence[RankReport], evidence: Evidence) -> Finding:
    wrong = {m.name for _, m in gradients}
    ordered = [name for name in reversed(evidence.names) if name in wrong]
    name = ordered[0]
    own = _of(gradients, name)
    worst = max((m for _, m in own), key=lambda m: m.relative)
    finding = Finding("gradient", name, worst.step, worst.relative, worst.ratio, also=tuple(ordered[1:]))
    backward = _largest_deviation(evidence.deviations, "backward") if worst.step == 0 else None
    if backward is not None and not is_within(name, backward.faulty.module):
        return _backward_finding(finding, backward, evidence)
    pairs = [(m.actual, m.expected) for _, m in own if m.actual is not None and m.expected is not None]
    cause = _declaration_cause(name, own, reports, evidence.classes)
    same_cause = [
        other
        for other in ordered[1:]
        if cause and _declaration_cause(other, _of(gradients, other), reports, evidence.classes)
    ]
    on_every_rank = sum(name in report.names for report in reports) == len({id(report) for report, _ in own})
    if on_every_rank:
        cause = cause or factor_cause([m.ratio for _, m in own], evidence.degrees, pairs)
    if cause is None and backward is not None:
        return _backward_finding(finding, backward, evidence)
    return replace(finding, cause=cause, also=tuple(same_cause or ordered[1:]))


def _backward_finding(finding: Finding, deviation: Deviation, evidence: Evidence) -> Finding:
    module = deviation.faulty.module
    _, per_rank, expected = _tensor_group(deviation, evidence.deviations)
    cause = evidence.impurity(module) or backward_cause(evidence.classes.label(module), per_rank, expected)
    return replace(finding, module=module, cause=cause)


def _of(gradients: Sequence[RankMismatch], name: str) -> list[RankMismatch]:
    return [(report, m) for report, m in gradients if m.name == name]


def _declaration_cause(
    name: str, own: Sequence[RankMismatch], reports: Sequence[RankReport], classes: ModuleClasses
) -> str | None:
    report, first = own[0]
    if first.actual is None or first.expected is None or first.placement is None:
        return None
    by_rank = {id(report): m for report, m in own}
    group = [other for other in reports if _same_tp_group(other.coordinates, report.coordinates)]
    group.sort(key=lambda other: other.coordinates[Axis.TP])
    by_tp_rank = (by_rank.get(id(other)) for other in group)
    per_rank = [first.expected if m is None or m.actual is None else m.actual for m in by_tp_rank]
    cause = gradient_cause(name, first.placement, per_rank, first.expected)
    module = name.rpartition(".")[0]
    caller = classes.user_module(module)
    if cause is not None and caller is not None and caller != module and module not in classes.user:
        cause += f"; {classes.label(module)} declares what {classes.label(caller)} passes to its constructor"
    return cause


def gradient_cause(name: str, placement: Placement, per_rank: Sequence[Tensor], expected: Tensor) -> str | None:
    """The likely cause of a wrong gradient of a parameter that is replicated over tp.

    Args:
        name: the parameter.
        placement: the declared placement.
        per_rank: the gradient on each rank of one tensor-parallel group, after all reductions.
        expected: the reference.
    """
    degree = len(per_rank)
    if degree == 1 or Axis.TP in placement.shards:
        return None
    owner, _, local = name.rpartition(".")
    declaration = f"placements() of {owner or 'the layer'}"
    if Axis.TP not in placement.partial and close(_sum(per_rank), expected):
        return (
            "undeclared partial gradient over tp: each rank holds a part, and the parts sum to the reference; "
            f'declare it in {declaration}: "{local}": Placement(…, partial=frozenset({{Axis.TP}}))'
        )
    if Axis.TP in placement.partial and all(close(value, degree * expected) for value in per_rank):
        return (
            f"declared partial over tp, but complete on every rank: it is exactly {degree} times the reference, and tp "
            f'is {degree}; do not declare "{local}" partial in {declaration}'
        )
    return None


def factor_cause(
    ratios: Sequence[float], degrees: Mapping[str, int], tensors: Sequence[tuple[Tensor, Tensor]] = ()
) -> str | None:
    """The likely cause of values that are n times, or 1/n of, the reference on every rank, for a parallel degree n.

    Args:
        ratios: the ratio of each rank's value to the reference.
        degrees: the degrees of the axes; every axis whose degree matches is named.
        tensors: pairs of actual and expected tensors; every element must have that ratio.
    """
    for degree in sorted({degree for degree in degrees.values() if degree > 1}):
        axes = " or ".join(axis for axis, size in degrees.items() if size == degree)
        for factor in (float(degree), 1 / degree):
            if not all(abs(ratio / factor - 1) < CLOSE for ratio in ratios):
                continue
            if not all(close(actual, factor * expected) for actual, expected in tensors):
                continue
            if factor > 1:
                return (
                    f"it is exactly {degree} times the reference, and the degree of {axes} is {degree}: most likely it "
                    f"is summed over {axes} once too often"
                )
            return (
                f"it is exactly 1/{degree} of the reference, and the degree of {axes} is {degree}: most likely a sum "
                f"over {axes} is missing"
            )
    return None


def output_cause(per_rank: Sequence[Tensor], expected: Sequence[Tensor], vectors: Mapping[str, Tensor]) -> str | None:
    """The likely cause of a wrong output of a module whose inputs are correct.

    Args:
        per_rank: the output on each rank of one tensor-parallel group.
        expected: the same part of the reference for each rank.
        vectors: the replicated one-dimensional parameters of the module by name, with their values in this forward.
    """
    degree = len(per_rank)
    if degree == 1:
        return None
    for name, vector in vectors.items():
        if vector.shape[0] == per_rank[0].shape[-1] and all(
            close(value - vector * (degree - 1), part) for value, part in zip(per_rank, expected, strict=True)
        ):
            return (
                f"{name.rpartition('.')[2]} added before the reduction: the output is off by exactly {degree - 1} × "
                f"{name}, and tp is {degree}; add it after the sum over tp"
            )
    if _is_multiple(per_rank, expected, degree):
        return (
            f"it is exactly {degree} times the reference, and tp is {degree}: most likely a complete tensor is summed "
            "over tp"
        )
    if _are_identical(expected) and close(_sum(per_rank), expected[0]):
        return (
            "missing reduction over tp: the sum over the ranks is the reference; end with a RowParallelLinear, or with "
            "megastack.comm.autograd.reduce_from"
        )
    return OWN_CODE


def backward_cause(module: str, per_rank: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """The likely cause if a module receives a correct gradient and passes on a wrong one."""
    where = f"the gradient is right at the output of {module} and wrong at its input"
    degree = len(per_rank)
    if degree > 1 and _are_identical(expected) and close(_sum(per_rank), expected[0]):
        return (
            f"{where}: each tp rank passes on its own part, and the parts sum to the reference; pass the input through "
            "megastack.comm.autograd.copy_to, or begin with a ColumnParallelLinear"
        )
    if degree > 1 and _is_multiple(per_rank, expected, degree):
        return f"{where}: it is exactly {degree} times the reference, and tp is {degree}; it is summed once too often"
    return f"{where}: the error is in its own code, for example a collective whose backward is not its conjugate"


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree closely enough to infer a cause."""
    if a.shape != b.shape or not a.numel():
        return False
    difference = float((a.double() - b.double()).abs().max())
    return difference <= CLOSE * max(float(b.double().abs().max()), 1e-300)


def _sum(per_rank: Iterable[Tensor]) -> Tensor:
    return torch.stack([value.double() for value in per_rank]).sum(0)


def _is_multiple(per_rank: Sequence[Tensor], expected: Sequence[Tensor], degree: int) -> bool:
    return all(close(value, degree * part) for value, part in zip(per_rank, expected, strict=True))


def _are_identical(expected: Sequence[Tensor]) -> bool:
    """Whether every rank should hold the same values."""
    return all(close(part, expected[0]) for part in expected)
