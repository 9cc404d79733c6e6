"""Peak activations of each rank: forwards that have run and whose backward has not.

A forward of one chunk adds 1/v of a rank's microbatch. B frees it; I frees the part that W does not need, and W the
rest. Only the order within a rank matters, not durations.
"""

from __future__ import annotations

from megastack.pipeline.action import OP_SHIFT, Op, code
from megastack.pipeline.schedule import Schedule


def peak_chunks(schedule: Schedule, weight_share: float = 1.0) -> tuple[float, ...]:
    """The largest number of chunk activations alive at once, for each rank; 0 for a schedule without backwards.

    Args:
        schedule: the schedule.
        weight_share: the part of an activation that W still needs after I; more than 1 if activations are recomputed.
    """
    if not schedule.backward:
        return (0.0,) * schedule.pp
    change = dict.fromkeys(Op, 0.0) | {Op.F: 1.0, Op.B: -1.0, Op.I: weight_share - 1.0, Op.W: -weight_share}
    by_bits = {code(op) >> OP_SHIFT: amount for op, amount in change.items()}
    peaks = []
    for rank in range(schedule.pp):
        live = peak = 0.0
        for packed in schedule.codes(rank):
            live += by_bits[packed >> OP_SHIFT & 31]
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def peak_microbatches(schedule: Schedule, weight_share: float = 1.0) -> tuple[float, ...]:
    """The same in microbatches of a whole rank: chunk activations divided by v."""
    return tuple(peak / schedule.chunks for peak in peak_chunks(schedule, weight_share))
