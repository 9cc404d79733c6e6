"""Weights of a blend, and their changes over the resumes of a run.

A checkpoint stores the history: the entries of the sample stream at which the weights changed. Sources are identified
by a digest of their content, not by name or path. This module imports neither numpy nor torch, so that planning stays
light.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megastack.errors import DataError

PERIOD = 1 << 16
"""Entries after which the pattern of sources repeats; weights are rounded to whole shares of it."""


@dataclass(frozen=True)
class WeightChange:
    """From entry `begin` of the sample stream on, sources are drawn with these weights, keyed by digest."""

    begin: int
    weights: Mapping[str, float]


History = tuple[WeightChange, ...]


def normalized(weights: Sequence[float]) -> list[float]:
    """Each weight divided by their sum; 0 if all are 0.

    The sum may overflow, and tiny weights lose digits in a division. Weights are therefore scaled by a power of two
    first, which leaves every digit of the quotients unchanged.
    """
    exponent = math.frexp(max(weights, default=0.0))[1]
    scaled = [math.ldexp(weight, -exponent) for weight in weights]
    total = sum(scaled)
    return [each / total if total else 0.0 for each in scaled]


def check_weights(weights: Sequence[float], counts: Sequence[int]) -> None:
    """Raise :class:`DataError` if no weight is positive, or a source with a positive weight has no training sample."""
    if not max(weights) > 0 or min(weights) < 0:
        raise DataError(f"data.blend: weights {list(weights)}; use weights of at least 0, one of them above 0")
    if (drawn := sum(weight > 0 for weight in weights)) > PERIOD:
        raise DataError(f"data.blend: {drawn:,} sources are drawn; use at most {PERIOD:,}, or several paths in one")
    for at, (weight, count) in enumerate(zip(weights, counts, strict=True)):
        if weight and not count:
            raise DataError(f"data.blend[{at}]: has no training sample; use more tokens, or weight 0")


def extend_history(history: History, entry: int, weights: Mapping[str, float]) -> History:
    """The history of a run that resumes at `entry` with `weights`; unchanged if the weights are."""
    kept = tuple(change for change in history if change.begin < entry)
    return kept if kept and dict(kept[-1].weights) == dict(weights) else (*kept, WeightChange(entry, dict(weights)))


def history_to_json(history: History) -> list[dict[str, Any]]:
    """The history as a checkpoint stores it."""
    return [asdict(change) for change in history]


def history_from_json(record: Sequence[Mapping[str, Any]]) -> History:
    """The inverse of :func:`history_to_json`."""
    return tuple(WeightChange(int(each["begin"]), dict(each["weights"])) for each in record)


def missing_sources(history: History, present: Mapping[str, float]) -> int:
    """Count the sources of the history that a run lacks; a source that is no longer drawn must stay, with weight 0."""
    return len({digest for change in history for digest in change.weights} - set(present))
