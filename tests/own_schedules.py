"""A user's pipeline schedules, named by their dotted path."""

from __future__ import annotations

from collections.abc import Sequence

from megastack.pipeline.action import Action


def fill_and_drain(pp: int, chunks: int, microbatches: int, *, order: str = "forward") -> list[list[Action]]:
    """GPipe with the microbatches in either order; one stage a rank."""
    numbers: Sequence[int] = range(microbatches)[:: -1 if order == "reverse" else 1]
    return [
        [Action.parse(f"{rank}F{m}") for m in numbers] + [Action.parse(f"{rank}B{m}") for m in numbers]
        for rank in range(pp)
    ]


def without_backward(pp: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Forwards only."""
    return [[Action.parse(f"{rank}F{m}") for m in range(microbatches)] for rank in range(pp)]


def split_backward(pp: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """Input gradients, then weight gradients."""
    return [[Action.parse(f"{rank}{op}{m}") for op in "FIW" for m in range(microbatches)] for rank in range(pp)]
