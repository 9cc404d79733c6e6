"""Weights of a blend as parts of a whole, for any finite weights; free of numpy and torch, so that plans use it too."""

from __future__ import annotations

import math
from collections.abc import Sequence


def parts(weights: Sequence[float]) -> list[float]:
    """Each weight over their sum; 0 if all are 0.

    The sum itself may be too large for a number, and tiny weights lose digits in a division. Weights are therefore
    scaled by a power of two first, which changes no digit of the quotients.
    """
    exponent = math.frexp(max(weights, default=0.0))[1]
    scaled = [math.ldexp(weight, -exponent) for weight in weights]
    total = sum(scaled)
    return [each / total if total else 0.0 for each in scaled]
