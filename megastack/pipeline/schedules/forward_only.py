"""Forwards without backwards, for validation; the stages stay on the ranks of the training schedule.

Microbatches pass the chunks in the same rounds as in the interleaved schedule, so few outputs are in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from megastack.errors import ScheduleError
from megastack.pipeline.action import Op
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.schedules.interleaved import passes, rounds


def forward_only(pp: int, chunks: int, microbatches: int, *, stage_ranks: Sequence[int] | None = None) -> Schedule:
    """One forward of each (stage, microbatch).

    Args:
        pp, chunks, microbatches: p, v and M; M may differ from the training schedule's.
        stage_ranks: the training schedule's `stage_ranks`; default stage s on rank s % pp.

    Raises:
        ScheduleError: one of the numbers is less than 1.
    """
    if min(pp, chunks, microbatches) < 1:
        raise ScheduleError(f"forward_only({pp}, {chunks}, {microbatches}): every number must be at least 1")
    owners = stage_ranks if stage_ranks is not None else [stage % pp for stage in range(pp * chunks)]
    sizes = rounds(pp, microbatches)
    rows = [passes(Op.F, [s for s, owner in enumerate(owners) if owner == rank], sizes) for rank in range(pp)]
    return Schedule.from_actions(rows, name="forward_only", microbatches=microbatches, backward=False)
