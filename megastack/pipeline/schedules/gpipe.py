"""GPipe: every forward, then every backward (Huang et al., arXiv 1811.06965).

With several chunks per rank it is the breadth-first pipeline (Lamy-Poirier, arXiv 2211.05953): all microbatches pass
one chunk, then the next. It is simple and keeps every activation of the step; use 1F1B unless memory is plentiful.
"""

from __future__ import annotations

from megastack.pipeline.action import Action, Op


def gpipe(pp: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """The actions of each rank; stage k·pp + r is chunk k of rank r."""
    return [
        [Action(Op.F, chunk * pp + rank, m) for chunk in range(chunks) for m in range(microbatches)]
        + [Action(Op.B, chunk * pp + rank, m) for chunk in reversed(range(chunks)) for m in range(microbatches)]
        for rank in range(pp)
    ]


def peaks(pp: int, chunks: int, microbatches: int) -> list[int]:
    """The most activations alive on each rank, in chunks."""
    return [microbatches * chunks] * pp


def idle(pp: int, chunks: int, microbatches: int) -> float:
    """Idle time of the longest span of a rank where F = I = W = 1: ((p-1) + (v-1)·max(0, p-M))·(F+B)/v."""
    return ((pp - 1) + (chunks - 1) * max(0, pp - microbatches)) * 3 / chunks
