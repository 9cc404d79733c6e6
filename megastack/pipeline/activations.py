"""Peak activations of each rank: forwards that have run and whose backward has not.

A forward of one chunk adds 1/v of a rank's microbatch. B frees it; I frees the part that W does not need, and W the
rest. Only the order within a rank matters, not durations.
"""

from __future__ import annotations

from megastack.pipeline.action import OP_SHIFT, Op, code
from megastack.pipeline.schedule import Schedule


def peak_microbatches(schedule: Schedule, weight_share: float = 1.0) -> tuple[float, ...]:
    """The most microbatches of a whole rank whose activations are alive at once, for each rank.

    Args:
        schedule: the schedule; without backwards the result is 0.
        weight_share: the part of an activation that W still needs after I; more than 1 if activations are recomputed.
    """
    return tuple(rank_peak_microbatches(schedule, rank, weight_share) for rank in range(schedule.pp))


def rank_peak_microbatches(schedule: Schedule, rank: int, weight_share: float = 1.0) -> float:
    """The same of one rank."""
    if not schedule.backward:
        return 0.0
    change = dict.fromkeys(Op, 0.0) | {Op.F: 1.0, Op.B: -1.0, Op.I: weight_share - 1.0, Op.W: -weight_share}
    by_bits = {code(op) >> OP_SHIFT: amount for op, amount in change.items()}
    live = peak = 0.0
    for packed in schedule.codes(rank):
        live += by_bits[packed >> OP_SHIFT & 31]
        peak = max(peak, live)
    return peak / schedule.chunks
