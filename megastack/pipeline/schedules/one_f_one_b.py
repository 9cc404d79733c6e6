"""1F1B: after a warm-up, forwards and backwards alternate (PipeDream-Flush, arXiv 2006.09503).

It has the same bubble as GPipe with at most p - r microbatches alive on rank r, for any M.
"""

from __future__ import annotations

from megastack.errors import Violation
from megastack.pipeline.action import Action, Op


def one_f_one_b(pp: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """The actions of each rank; stage r is rank r."""
    return [_rank(rank, warm_up(pp, rank, microbatches), microbatches) for rank in range(pp)]


def _rank(stage: int, warm: int, microbatches: int) -> list[Action]:
    forwards = [Action(Op.F, stage, m) for m in range(microbatches)]
    backwards = [Action(Op.B, stage, m) for m in range(microbatches)]
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return forwards[:warm] + steady + backwards[microbatches - warm :]


def warm_up(pp: int, rank: int, microbatches: int) -> int:
    """Forwards of `rank` before its first pair of a forward and a backward."""
    return min(pp - rank - 1, microbatches)


def peaks(pp: int, chunks: int, microbatches: int) -> list[int]:
    """The most activations alive on each rank, in chunks."""
    return [min(warm_up(pp, rank, microbatches) + 1, microbatches) for rank in range(pp)]


def idle(pp: int, chunks: int, microbatches: int) -> float:
    """Idle time of the longest span of a rank where F = I = W = 1: (p-1)·(F+B)."""
    return (pp - 1) * 3


def violations(pp: int, chunks: int, microbatches: int) -> list[Violation]:
    """The errors of these sizes: there must be one chunk per rank."""
    if chunks == 1:
        return []
    return [Violation("schedule.chunks", chunks, "1f1b runs one stage a rank", (1, "schedule.name=interleaved"))]
