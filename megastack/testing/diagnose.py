"""From what differs on which rank to one finding: the first module or parameter that is wrong, how much, and why.

Order matters, for a fault spreads: a wrong forward makes every gradient wrong, a wrong gradient every later weight. So
a module that is to blame in the forward comes first; then the gradient that is used last, for backwards run from the
loss; then what is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megastack.mesh.shape import DENSE_AXES, Axis
from megastack.testing.cause import backward_cause, factor_cause, gradient_cause, output_cause
from megastack.testing.module_trace import Fault
from megastack.testing.on_ranks import Mismatch, RankFaults, RankReport


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong.

    Attributes:
        kind: ``module``, ``gradient``, ``loss``, ``norm``, ``weight`` or ``failure``.
        name: the module's or the parameter's global name; empty for a scalar.
        step: 0-based.
        relative: by how much, over the largest element of the reference.
        ratio: the factor from the reference, of parameters and scalars.
        cause: what the numbers tell, if anything.
        module: where the gradient goes wrong, if that is known.
        also: what else differs, in the same way where that can be told.
        owner: the class of the module, or of the one that owns the parameter.
    """

    kind: str
    name: str
    step: int = 0
    relative: float | None = None
    ratio: float | None = None
    cause: str | None = None
    module: str | None = None
    also: tuple[str, ...] = ()
    owner: str | None = None


def diagnose(
    reports: Sequence[RankReport],
    faults: Sequence[RankFaults],
    names: Sequence[str],
    degrees: Mapping[str, int],
) -> Finding:
    """The first thing that is wrong on a layout.

    Args:
        reports: of all ranks; at least one has a mismatch.
        faults: the modules that ranks blame; empty where that could not be found out.
        names: all parameters in the order of their use.
        degrees: of the axes.
    """
    finding = _first_finding(reports, faults, names, degrees)
    owner = finding.name if finding.kind == "module" else finding.name.rpartition(".")[0]
    return replace(finding, owner=next((rank.classes[owner] for rank in faults if owner in rank.classes), None))


def _first_finding(
    reports: Sequence[RankReport], faults: Sequence[RankFaults], names: Sequence[str], degrees: Mapping[str, int]
) -> Finding:
    forward = _first(faults, "forward")
    if forward is not None:
        return _module_finding(forward, faults)
    first = min((m.step for report in reports for m in report.mismatches), default=0)
    found = [(report, m) for report in reports for m in report.mismatches if m.step == first]
    run = found[0][1].run
    found = [(report, m) for report, m in found if m.run == run]
    gradients = [(report, m) for report, m in found if m.kind == "gradient"]
    losses = [m for _, m in found if m.kind == "loss"]
    if gradients and not losses:
        return _gradient_finding(gradients, reports, faults, names, degrees)
    worst = max((m for _, m in found), key=lambda m: (m.kind == "loss", m.kind == "norm", m.relative))
    cause = factor_cause([worst.ratio], degrees)
    also = tuple(sorted({m.name for _, m in found if m.name and m.name != worst.name}))
    return Finding(worst.kind, worst.name, first, worst.relative, worst.ratio, cause, also=also)


def _first(faults: Sequence[RankFaults], side: str) -> Fault | None:
    found = [fault for rank in faults for fault in rank.faults if fault.side == side]
    order = min if side == "forward" else max
    return order(found, key=lambda fault: fault.order) if found else None


def _module_finding(fault: Fault, faults: Sequence[RankFaults]) -> Finding:
    group, copies, expected = _tensor_group(fault, faults)
    inside = {
        name: vector
        for rank in group[:1]
        for name, vector in rank.vectors.items()
        if name.startswith(fault.module + ".")
    }
    relative = max(f.relative for rank in faults for f in rank.faults if f.module == fault.module)
    cause = output_cause(copies, expected, inside) if fault.proven else None
    return Finding("module", fault.module, 0, relative, cause=cause)


def _tensor_group(fault: Fault, faults: Sequence[RankFaults]) -> tuple[list[RankFaults], list[Tensor], list[Tensor]]:
    """The ranks of one tensor-parallel group that see a fault, and their tensors; the others' are right."""
    seeing = [rank for rank in faults if any(_same(f, fault) for f in rank.faults)]
    group = [rank for rank in faults if _beside(rank.coordinates, seeing[0].coordinates)]
    group.sort(key=lambda rank: rank.coordinates[Axis.TP])
    seen = [next((f for f in rank.faults if _same(f, fault)), None) for rank in group]
    known = next(f for f in seen if f is not None)
    copies = [known.expected if f is None else f.actual for f in seen]
    return group, copies, [(f or known).expected for f in seen]


def _same(a: Fault, b: Fault) -> bool:
    return a.module == b.module and a.side == b.side


def _beside(a: Mapping[Axis, int], b: Mapping[Axis, int]) -> bool:
    """Whether two ranks are of one tensor-parallel group."""
    return all(a[axis] == b[axis] for axis in DENSE_AXES if axis != Axis.TP)


Found = tuple[RankReport, Mismatch]


def _gradient_finding(
    gradients: Sequence[Found],
    reports: Sequence[RankReport],
    faults: Sequence[RankFaults],
    names: Sequence[str],
    degrees: Mapping[str, int],
) -> Finding:
    wrong = {m.name for _, m in gradients}
    ordered = [name for name in reversed(names) if name in wrong]
    name = ordered[0]
    own = [(report, m) for report, m in gradients if m.name == name]
    worst = max((m for _, m in own), key=lambda m: m.relative)
    finding = Finding("gradient", name, worst.step, worst.relative, worst.ratio, also=tuple(ordered[1:]))
    break_ = _first(faults, "backward") if worst.step == 0 else None
    if break_ is not None and not name.startswith(break_.module + "."):
        _, copies, expected = _tensor_group(break_, faults)
        return replace(finding, module=break_.module, cause=backward_cause(break_.module, copies, expected))
    cause = _declaration_cause(name, own, reports) or factor_cause([m.ratio for _, m in own], degrees)
    alike = [other for other in ordered[1:] if cause and _declaration_cause(other, _of(gradients, other), reports)]
    if cause is None and break_ is not None:
        _, copies, expected = _tensor_group(break_, faults)
        return replace(finding, module=break_.module, cause=backward_cause(break_.module, copies, expected))
    return replace(finding, cause=cause, also=tuple(alike or ordered[1:]))


def _of(gradients: Sequence[Found], name: str) -> list[Found]:
    return [(report, m) for report, m in gradients if m.name == name]


def _declaration_cause(name: str, own: Sequence[Found], reports: Sequence[RankReport]) -> str | None:
    report, first = own[0]
    if first.actual is None or first.expected is None or first.placement is None:
        return None
    by_rank = {id(report): m for report, m in own}
    group = sorted(
        (r for r in reports if _beside(r.coordinates, report.coordinates)), key=lambda r: r.coordinates[Axis.TP]
    )
    copies = [
        found.actual if (found := by_rank.get(id(r))) and found.actual is not None else first.expected for r in group
    ]
    return gradient_cause(name, first.placement, copies, first.expected)
