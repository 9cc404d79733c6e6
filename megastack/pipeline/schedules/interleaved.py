"""Interleaved 1F1B: each rank holds several chunks of the model (Narayanan et al., arXiv 2104.04473).

The bubble shrinks by the number of chunks v; messages grow by v, and so does a little memory. Microbatches pass a chunk
in rounds. The paper needs M to be a multiple of p; here the M microbatches are cut into R = max(1, M // p) rounds of
near-equal size, larger first, which runs for every M.
"""

from __future__ import annotations

from megastack.errors import ScheduleError
from megastack.pipeline.action import Action, Op


def interleaved(pp: int, chunks: int, microbatches: int, *, round: int | None = None) -> list[list[Action]]:
    """The actions of each rank; stage k·pp + r is chunk k of rank r.

    Args:
        pp, chunks, microbatches: p, v and M.
        round: microbatches of a round, exactly (the last round takes what is left); default the rounds above.

    Raises:
        ScheduleError: when `round` leaves a round of fewer than min(p, M) microbatches.
    """
    return [_rank(pp, rank, chunks, rounds(pp, microbatches, round)) for rank in range(pp)]


def _rank(pp: int, rank: int, chunks: int, sizes: list[int]) -> list[Action]:
    forwards = passes(Op.F, [chunk * pp + rank for chunk in range(chunks)], sizes)
    backwards = passes(Op.B, [chunk * pp + rank for chunk in reversed(range(chunks))], sizes)
    warm = warm_up(pp, rank, chunks, sizes)
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return forwards[:warm] + steady + backwards[len(forwards) - warm :]


def passes(op: Op, stages: list[int], sizes: list[int]) -> list[Action]:
    """Round by round, stage by stage, each microbatch of the round."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        Action(op, stage, start + i)
        for start, size in zip(starts, sizes, strict=True)
        for stage in stages
        for i in range(size)
    ]


def rounds(pp: int, microbatches: int, round: int | None = None) -> list[int]:
    """Sizes of the rounds: near-equal and at least min(p, M), or `round` each.

    Raises:
        ScheduleError: when `round` leaves a round of fewer than min(p, M). Its first microbatch would reach the next
            chunk before the round has left the last rank, so ranks stall, and most such schedules never finish.
    """
    least = min(pp, microbatches)
    if round is None:
        count = max(1, microbatches // pp)
        size, larger = divmod(microbatches, count)
        return [size + 1] * larger + [size] * (count - larger)
    full, rest = divmod(microbatches, max(1, round))
    if round < least or 0 < rest < least:
        legal = [size for size in range(least, microbatches + 1) if not 0 < microbatches % size < least]
        raise ScheduleError(
            f"schedule.round={round}: each round of the {microbatches} microbatches, the last one too, must have at "
            f"least {least}; use null, {_words(legal)}"
        )
    return [round] * full + [rest] * bool(rest)


def _words(sizes: list[int]) -> str:
    shown = [*map(str, sizes[:8]), *(["…", str(sizes[-1])] if len(sizes) > 8 else [])]
    return " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def warm_up(pp: int, rank: int, chunks: int, sizes: list[int]) -> int:
    """Forwards of `rank`, over all its chunks, before its first pair of a forward and a backward."""
    return min(2 * (pp - rank - 1) + (chunks - 1) * sizes[0], sum(sizes) * chunks)


def peaks(pp: int, chunks: int, microbatches: int, *, round: int | None = None) -> list[int]:
    """The most activations alive on each rank, in chunks."""
    sizes = rounds(pp, microbatches, round)
    return [min(warm_up(pp, rank, chunks, sizes) + 1, microbatches * chunks) for rank in range(pp)]
