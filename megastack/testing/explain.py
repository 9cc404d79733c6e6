"""A finding in words, for ``megastack verify`` and ``assert_parity``."""

from __future__ import annotations

from math import isfinite

from megastack.testing.compare import TOLERANCES
from megastack.testing.diagnose import Finding
from megastack.testing.layer_training import INPUT_GRADIENT

NAMED = 3
"""Other parameters that are named after the first one."""
UNKNOWN = "the numbers do not tell"
_ALLOWED = min(TOLERANCES.values())


def finding_lines(finding: Finding) -> list[tuple[str, str]]:
    """What differs, by how much, why, and what else; each part with its label."""
    lines = [("differs", f"{_subject(finding)}, at step {finding.step + 1}")]
    if finding.relative is not None:
        lines.append(("by", f"{figure(finding.relative)} of its largest element; {_ALLOWED:g} is allowed"))
    lines.append(("cause", finding.cause or UNKNOWN))
    if finding.also:
        more = f", … ({len(finding.also)} in all)" if len(finding.also) > NAMED else ""
        lines.append(("also", ", ".join(finding.also[:NAMED]) + more))
    return lines


def finding_text(finding: Finding) -> str:
    """The lines of a finding."""
    return "\n".join(f"{label:8} {text}" for label, text in finding_lines(finding))


def figure(value: float | None) -> str:
    """A difference with two digits."""
    if value is None:
        return "–"
    return "not finite" if not isfinite(value) else "0" if value == 0 else f"{value:.2g}"


def _subject(finding: Finding) -> str:
    owner = f" ({finding.owner})" if finding.owner and finding.module is None else ""
    match finding.kind:
        case "module":
            return f"the output of {finding.name or 'the layer'}{owner}, the first module that differs"
        case "gradient":
            name = "the layer's input" if finding.name == INPUT_GRADIENT else finding.name
            return f"the gradient of {name}{owner}, the first that differs seen from the loss"
        case "weight":
            return f"the weight {finding.name}{owner}, though its gradient agrees"
    return {"norm": "the gradient norm, though every gradient agrees"}.get(finding.kind, f"the {finding.kind}")
