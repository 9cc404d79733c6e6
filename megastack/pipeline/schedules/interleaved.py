"""Interleaved 1F1B: each rank holds several chunks of the model (Narayanan et al., arXiv 2104.04473).

With v chunks the bubble is v times shorter and there are v times as many messages; memory grows a little. Microbatches
pass a chunk in rounds. The paper requires M to be a multiple of p. Here the M microbatches are divided into
R = max(1, M // p) rounds of near-equal size, larger first, which works for every M.
"""

from __future__ import annotations

from collections.abc import Sequence

from megastack.errors import ScheduleError, Violation, counted
from megastack.pipeline.action import Action, Op
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules import gpipe


def interleaved(pp: int, chunks: int, microbatches: int, *, round: int | None = None) -> list[list[Action]]:
    """The actions of each rank; stage k·pp + r is chunk k of rank r.

    Args:
        pp, chunks, microbatches: p, v and M.
        round: the exact number of microbatches in a round (the last round has the rest); by default the rounds above.
    """
    return [_rank(pp, rank, chunks, rounds(pp, microbatches, round)) for rank in range(pp)]


def _rank(pp: int, rank: int, chunks: int, sizes: list[int]) -> list[Action]:
    forwards = passes(Op.F, [chunk * pp + rank for chunk in range(chunks)], sizes)
    backwards = passes(Op.B, [chunk * pp + rank for chunk in reversed(range(chunks))], sizes)
    warm = warm_up(pp, rank, chunks, sizes)
    steady = [action for pair in zip(forwards[warm:], backwards, strict=False) for action in pair]
    return forwards[:warm] + steady + backwards[len(forwards) - warm :]


def passes(op: Op, stages: list[int], sizes: list[int]) -> list[Action]:
    """The passes ordered by round, then by stage, then by microbatch within the round."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        Action(op, stage, start + i)
        for start, size in zip(starts, sizes, strict=True)
        for stage in stages
        for i in range(size)
    ]


def rounds(pp: int, microbatches: int, round: int | None = None) -> list[int]:
    """Sizes of the rounds: near-equal and at least min(p, M), or `round` each."""
    if round is not None:
        full, rest = divmod(microbatches, round)
        return [round] * full + [rest] * bool(rest)
    count = max(1, microbatches // pp)
    size, larger = divmod(microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def violations(pp: int, chunks: int, microbatches: int, *, round: int | None = None) -> list[Violation]:
    """The errors of these sizes: each round, the last one included, needs at least min(p, M) microbatches.

    With fewer, its first microbatch reaches the next chunk before the round has filled the pipeline: ranks stall, and
    most such schedules deadlock.
    """
    least = min(pp, microbatches)
    if round is None or (round >= least and not 0 < microbatches % round < least):
        return []
    total = counted(microbatches, "microbatch", "microbatches")
    rule = f"each round of the {total}, the last one too, must have at least {least}"
    legal = [size for size in range(least, microbatches + 1) if not 0 < microbatches % size < least]
    return [Violation("schedule.round", round, rule, (None, *legal[:8]))]


def warm_up(pp: int, rank: int, chunks: int, sizes: list[int]) -> int:
    """Forwards of `rank`, over all its chunks, before its first pair of a forward and a backward."""
    return min(2 * (pp - rank - 1) + (chunks - 1) * sizes[0], sum(sizes) * chunks)


def peaks(pp: int, chunks: int, microbatches: int, *, round: int | None = None) -> list[int]:
    """The most activations alive on each rank, in chunks."""
    sizes = rounds(pp, microbatches, round)
    return [min(warm_up(pp, rank, chunks, sizes) + 1, microbatches * chunks) for rank in range(pp)]


def idle(pp: int, chunks: int, microbatches: int, *, round: int | None = None) -> float:
    """Idle time of the longest span of a rank where F = I = W = 1, for any round; as for GPipe with as many chunks."""
    return gpipe.idle(pp, chunks, microbatches)


def forward_only(pp: int, chunks: int, microbatches: int, *, stage_ranks: Sequence[int] | None = None) -> Schedule:
    """One forward of each (stage, microbatch), for validation; the stages stay on the ranks of the training schedule.

    Microbatches pass the chunks in the same rounds as in the interleaved schedule, so few outputs are in flight.

    Args:
        pp, chunks, microbatches: p, v and M; M may differ from the training schedule's.
        stage_ranks: the training schedule's `stage_ranks`; by default stage s is on rank s % pp.

    Raises:
        ScheduleError: one of the numbers is less than 1.
    """
    if min(pp, chunks, microbatches) < 1:
        raise ScheduleError(f"forward_only({pp}, {chunks}, {microbatches}): every number must be at least 1")
    owners = stage_ranks if stage_ranks is not None else [stage % pp for stage in range(pp * chunks)]
    sizes = rounds(pp, microbatches)
    rows = [passes(Op.F, [s for s, owner in enumerate(owners) if owner == rank], sizes) for rank in range(pp)]
    return Schedule.from_actions(rows, name="forward_only", microbatches=microbatches, backward=False)
