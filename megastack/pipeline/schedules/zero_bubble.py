"""ZB-H1 and ZB-H2: 1F1B with the backward split, W filling the bubble (Qi et al., arXiv 2401.10241).

The previous rank waits for I, the gradient of the input, but no rank waits for W, the gradient of the weights. W is
therefore deferred: by one microbatch more on each rank than on the previous one (by two in ZB-H2), so that the last
rank sends its gradients as early as possible. No rank waits for rank 0, which runs full backwards, B. ZB-H1 keeps p
microbatches on every rank, as many as rank 0 of 1F1B. ZB-H2 runs twice as many forwards ahead and keeps up to 2p - 1;
its ranks then work without a gap if F = I = W, though later ones start and end later. If W is at most F and at most I,
`idle` is exact for the longest span of a rank, and a whole step idles for max(`idle`, (p - 1)·F), since the last rank
has to wait (p - 1)·F in any order.
"""

from __future__ import annotations

from megastack.errors import Violation
from megastack.pipeline.action import Action, Op


def zb_h1(pp: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """The actions of each rank; stage r is rank r. At most p microbatches alive."""
    return [_rank(rank, warm_up(pp, rank, microbatches, depth=1), rank, microbatches) for rank in range(pp)]


def zb_h2(pp: int, chunks: int, microbatches: int) -> list[list[Action]]:
    """The actions of each rank; stage r is rank r. At most 2p - 1 microbatches alive."""
    return [_rank(rank, warm_up(pp, rank, microbatches, depth=2), 2 * rank, microbatches) for rank in range(pp)]


def _rank(stage: int, warm: int, max_lag: int, microbatches: int) -> list[Action]:
    """Run forwards `warm` microbatches ahead of I, and W up to `max_lag` microbatches behind it.

    W is not deferred past the last pair of a forward and an I, after which a rank has only W to run until its next I.
    """
    late = min(max_lag, max(0, microbatches - warm - 1))
    backward = Op.I if stage else Op.B
    actions = [Action(Op.F, stage, m) for m in range(warm)]
    for m in range(microbatches + late):
        if warm + m < microbatches:
            actions.append(Action(Op.F, stage, warm + m))
        if m < microbatches:
            actions.append(Action(backward, stage, m))
        if m >= late and backward is Op.I:
            actions.append(Action(Op.W, stage, m - late))
    return actions


def warm_up(pp: int, rank: int, microbatches: int, *, depth: int) -> int:
    """Forwards of `rank` before its first pair of a forward and an I: `depth` for each later stage."""
    return min(depth * (pp - rank - 1), microbatches)


def peaks(pp: int, chunks: int, microbatches: int, *, depth: int, weight_share: float = 1.0) -> list[float]:
    """The most activations alive on each rank, in chunks.

    Args:
        pp, chunks, microbatches: p, 1 and M.
        depth: 1 for ZB-H1, 2 for ZB-H2.
        weight_share: the part of an activation that W still needs after I.
    """
    most = min(microbatches, _most_alive(pp, depth))
    whole = [min(warm_up(pp, rank, microbatches, depth=depth) + 1, microbatches) for rank in range(pp)]
    return [forwards + weight_share * (most - forwards) for forwards in whole]


def idle(
    pp: int,
    chunks: int,
    microbatches: int,
    *,
    depth: int,
    F: float = 1.0,
    I: float = 1.0,  # noqa: E741
    W: float = 1.0,
) -> float:
    """Idle time of the longest span of a rank, in a step of M·(F + I + W), where W is at most F and at most I.

    With M >= p that is (p-1)(F+I-W) for ZB-H1, with M >= 2p - 1 (p-1)(F+I-2W) for ZB-H2. With M <= p both are equal.
    """
    return (pp - 1) * (F + I) - (min(microbatches, _most_alive(pp, depth)) - 1) * W


def _most_alive(pp: int, depth: int) -> int:
    return depth * (pp - 1) + 1


def violations(pp: int, chunks: int, microbatches: int, *, name: str) -> list[Violation]:
    """The errors of these sizes: there must be one chunk per rank."""
    if chunks == 1:
        return []
    return [Violation("schedule.chunks", chunks, f"{name} runs one stage a rank", (1, "schedule.name=interleaved"))]
