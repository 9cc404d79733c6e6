"""From what differs on which rank to one finding: the first module or parameter that is wrong, how much, and why.

Order matters, for a fault spreads: a wrong forward makes every gradient wrong, a wrong gradient every later weight. So
a module that is at fault in the forward comes first; then the gradient that is used last, for backwards run from the
loss; then what is left. A cause is given only where the numbers show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from megastack.mesh.shape import DENSE_AXES, Axis
from megastack.testing.blame import Classes, Deviation, RankDeviations, inside
from megastack.testing.cause import OWN_CODE, backward_cause, factor_cause, gradient_cause, output_cause
from megastack.testing.on_ranks import Mismatch, RankReport


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
        module: the module at fault, where that is known and is not ``name``.
        also: what else differs, in the same way where that can be told.
        owner: the class at fault: of ``module``, or of the module or parameter that is named. It is the innermost class
            of the user's around that, or else the class of the package.
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


@dataclass(frozen=True)
class Evidence:
    """What is known beside the numbers of a training.

    Attributes:
        names: all parameters in the order of their use.
        degrees: of the axes.
        faults: the modules at fault as each rank sees them; empty where that could not be found out.
        unstable: modules that depend on more than their input, on one rank already, and on what.
    """

    names: Sequence[str]
    degrees: Mapping[str, int]
    errors: Sequence[RankDeviations] = ()
    unstable: Mapping[str, str] = field(default_factory=dict)

    @property
    def classes(self) -> Classes:
        """The classes of all modules."""
        return self.errors[0].classes if self.errors else Classes({})

    def instability(self, module: str) -> str | None:
        """What a module, or the first one inside that does, depends on beside its input."""
        found = next(((name, why) for name, why in self.unstable.items() if inside(name, module)), None)
        if found is None:
            return None
        name, why = found
        return f"{'it' if name == module else self.classes.label(name)} {why}"


def diagnose(reports: Sequence[RankReport], evidence: Evidence) -> Finding | None:
    """The first thing that is wrong on a layout.

    Args:
        reports: of all ranks.
        evidence: what else is known.

    Returns:
        None where neither a module nor a number is wrong.
    """
    finding = _first_finding(reports, evidence)
    if finding is None:
        return None
    if finding.cause is None and finding.module is None and finding.kind != "module":
        finding = _suspect(finding, evidence)
    place = finding.module
    if place is None:
        place = finding.name if finding.kind == "module" else finding.name.rpartition(".")[0]
    has_place = finding.module is not None or finding.kind == "module" or bool(finding.name)
    return replace(finding, owner=evidence.classes.owner_class(place) if has_place else None)


def _suspect(finding: Finding, evidence: Evidence) -> Finding:
    """A finding without a cause, explained by a module that depends on more than its input."""
    owner = finding.name.rpartition(".")[0]
    related = (
        name
        for name in evidence.unstable
        if finding.kind != "gradient" or inside(owner, name) or inside(name, owner)  # a gradient has its own module
    )
    module = next(related, None)
    if module is None:
        return finding
    return replace(finding, module=module, cause=f"{evidence.classes.label(module)} {evidence.unstable[module]}")


def _first_finding(reports: Sequence[RankReport], evidence: Evidence) -> Finding | None:
    forward = _first(evidence.errors, "forward")
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
    return Finding(worst.kind, worst.name, first, worst.relative, worst.ratio, cause, also=also)


def _first(errors: Sequence[RankDeviations], side: str) -> Deviation | None:
    """The fault of a side, from the rank that is furthest off."""
    found = [error for rank in errors for error in rank.errors if error.blame.side == side]
    return max(found, key=lambda error: error.relative, default=None)


def _module_finding(error: Deviation, evidence: Evidence) -> Finding:
    blame, classes = error.blame, evidence.classes
    where = ""
    if blame.first != blame.module:
        where = f"; inside it {classes.label(blame.first)} differs first"
    elif blame.handed is not None:
        where = f"; what it gives to {classes.label(blame.handed)} differs already"
    unstable = evidence.instability(blame.module)
    if unstable is not None or not blame.proven:
        return Finding("module", blame.module, 0, error.relative, cause=unstable)
    group, copies, expected = _tensor_group(error, evidence.errors)
    vectors = {name: x for rank in group[:1] for name, x in rank.vectors.items() if inside(name, blame.module)}
    cause = output_cause(copies, expected, vectors) or OWN_CODE
    return Finding("module", blame.module, 0, error.relative, cause=cause + where)


def _tensor_group(
    error: Deviation, errors: Sequence[RankDeviations]
) -> tuple[list[RankDeviations], list[Tensor], list[Tensor]]:
    """The ranks of the tensor-parallel group that sees a fault, and their tensors in the slot that is furthest off."""
    seeing = next(rank for rank in errors if any(f is error for f in rank.errors))
    group = [rank for rank in errors if _beside(rank.coordinates, seeing.coordinates)]
    group.sort(key=lambda rank: rank.coordinates[Axis.TP])
    slot = max(error.tensors, key=lambda at: error.tensors[at][0])
    seen = [next((f.tensors.get(slot) for f in rank.errors if f.blame == error.blame), None) for rank in group]
    pairs = [pair for pair in seen if pair is not None]
    return group, [actual for _, actual, _ in pairs], [expected for _, _, expected in pairs]


def _beside(a: Mapping[Axis, int], b: Mapping[Axis, int]) -> bool:
    """Whether two ranks are of one tensor-parallel group."""
    return all(a[axis] == b[axis] for axis in DENSE_AXES if axis != Axis.TP)


Found = tuple[RankReport, Mismatch]


def _gradient_finding(gradients: Sequence[Found], reports: Sequence[RankReport], evidence: Evidence) -> Finding:
    wrong = {m.name for _, m in gradients}
    ordered = [name for name in reversed(evidence.names) if name in wrong]
    name = ordered[0]
    own = _of(gradients, name)
    worst = max((m for _, m in own), key=lambda m: m.relative)
    finding = Finding("gradient", name, worst.step, worst.relative, worst.ratio, also=tuple(ordered[1:]))
    broken = _first(evidence.errors, "backward") if worst.step == 0 else None
    if broken is not None and not inside(name, broken.blame.module):
        return _backward_finding(finding, broken, evidence)
    pairs = [(m.actual, m.expected) for _, m in own if m.actual is not None and m.expected is not None]
    cause = _declaration_cause(name, own, reports, evidence.classes)
    alike = [
        other
        for other in ordered[1:]
        if cause and _declaration_cause(other, _of(gradients, other), reports, evidence.classes)
    ]
    if sum(name in report.names for report in reports) == len({id(report) for report, _ in own}):  # on every rank
        cause = cause or factor_cause([m.ratio for _, m in own], evidence.degrees, pairs)
    if cause is None and broken is not None:
        return _backward_finding(finding, broken, evidence)
    return replace(finding, cause=cause, also=tuple(alike or ordered[1:]))


def _backward_finding(finding: Finding, broken: Deviation, evidence: Evidence) -> Finding:
    module = broken.blame.module
    _, copies, expected = _tensor_group(broken, evidence.errors)
    cause = evidence.instability(module) or backward_cause(evidence.classes.label(module), copies, expected)
    return replace(finding, module=module, cause=cause)


def _of(gradients: Sequence[Found], name: str) -> list[Found]:
    return [(report, m) for report, m in gradients if m.name == name]


def _declaration_cause(name: str, own: Sequence[Found], reports: Sequence[RankReport], classes: Classes) -> str | None:
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
    cause = gradient_cause(name, first.placement, copies, first.expected)
    module = name.rpartition(".")[0]
    caller = classes.owner(module)
    if cause is not None and caller is not None and caller != module and module not in classes.own:
        cause += f"; {classes.label(module)} declares what {classes.label(caller)} builds it with"
    return cause
