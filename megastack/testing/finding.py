"""A finding, the first wrong module or number of a layout, and its text for ``verify`` and ``assert_parity``."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from megastack.testing.compare import INPUT_GRADIENT, TOLERANCES

OTHERS_LISTED = 3
"""The number of other differing parameters that are listed by name."""
UNKNOWN = "unknown: the differences fit no known mistake"
_ALLOWED = min(TOLERANCES.values())

Held = Literal["trained", "frozen", "buffer", "missing"]


@dataclass(frozen=True)
class Finding:
    """The first wrong module or number.

    Attributes:
        kind: ``module``, ``gradient``, ``loss``, ``norm``, ``weight`` (or a buffer) or ``failure``.
        name: the global name of the module, parameter or buffer; empty for a scalar.
        step: 0-based.
        relative: the difference relative to the scale of the reference, see :mod:`megastack.testing.compare`.
        ratio: the factor from the reference, for parameters and scalars.
        cause: the likely cause; None if the numbers show none.
        module: the module at fault, if it is known and is not ``name``.
        also: the other differences, which have the same cause if that is known.
        owner: the class responsible for ``module``, or else for ``name``: the innermost enclosing user-defined class,
            or else the class of the package.
        held: the type of a ``weight``: a ``trained`` or ``frozen`` parameter, a ``buffer``, or ``missing`` on every
            rank.
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
    held: Held = "trained"


def finding_lines(finding: Finding) -> list[tuple[str, str]]:
    """The difference, its size, the likely cause, and the other differences, each with its label."""
    lines = [("differs", _subject(finding))]
    if finding.relative is not None:
        lines.append(("by", f"{figure(finding.relative)} relative to {_scale(finding.kind)}; {_ALLOWED:g} is allowed"))
    lines.append(("cause", finding.cause or UNKNOWN))
    if finding.also:
        more = f", … ({len(finding.also)} in all)" if len(finding.also) > OTHERS_LISTED else ""
        lines.append(("also", ", ".join(map(_label, finding.also[:OTHERS_LISTED])) + more))
    return lines


def _scale(kind: str) -> str:
    """The value to which the difference of a finding is relative."""
    match kind:
        case "loss" | "norm":
            return "the reference"
        case "module":
            return "the largest element of the reference"
    return "its largest element (or 1/1000 of the model's largest)"


def finding_text(finding: Finding) -> str:
    """The lines of a finding."""
    return "\n".join(f"{label:8} {text}" for label, text in finding_lines(finding))


def figure(value: float | None) -> str:
    """A difference with two digits."""
    if value is None:
        return "–"
    return "not finite" if not isfinite(value) else "0" if value == 0 else f"{value:.2g}"


def _subject(finding: Finding) -> str:
    """The quantity that differs, and the step."""
    at = f"at step {finding.step + 1}"
    owner = f" ({finding.owner})" if finding.owner and finding.module is None else ""
    match finding.kind:
        case "module":
            return f"the output of {finding.name or 'the layer'}{owner}, the first module that differs, {at}"
        case "gradient":
            return f"the gradient of {_label(finding.name)}{owner}, the first that differs in the backward pass, {at}"
        case "weight":
            return _weight_subject(f"{finding.name}{owner}", at, finding.held)
        case "norm":
            return f"the gradient norm {at}, although every gradient matches"
    return f"the {finding.kind} {at}"


def _label(name: str) -> str:
    return "the layer's input" if name == INPUT_GRADIENT else name


def _weight_subject(name: str, at: str, held: Held) -> str:
    match held:
        case "trained":
            return f"the weight {name} after step {at.removeprefix('at step ')}, although its gradient matches"
        case "frozen":
            return f"the frozen weight {name}, {at}"
        case "buffer":
            return f"the buffer {name}, {at}"
        case "missing":
            return f"the weight {name}, which no rank holds"
