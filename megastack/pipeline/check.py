"""Prove that a schedule is complete, in order and cannot hang, before anything runs it.

In turn: every (stage, microbatch) has its F once and its B, or its I and W, once, each on the stage's rank and behind
what it needs; sends match receives in first-in-first-out order; ranks make progress when sends are posted and never
block and receives are waited for at first use; and also when neighbouring messages of a rank run as one unit
(``messages``). The first fault raises a ScheduleError that shows the rank by step grid with the offending action
marked.
"""

from __future__ import annotations

from dataclasses import dataclass

from megastack.errors import counted
from megastack.pipeline.action import COMPUTE, SENDS, Op, code, microbatch_of, op_of, stage_of, unpack
from megastack.pipeline.activations import peak_microbatches
from megastack.pipeline.boundary import has_communication
from megastack.pipeline.communication import with_communication
from megastack.pipeline.messages import check_batched, check_messages
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import error, run_order


@dataclass(frozen=True)
class CheckReport:
    """What is known of a schedule that passed.

    Attributes:
        peaks: for each rank, the most activations alive, in microbatches of the whole rank (chunk activations over v).
        sends: for each rank, the messages that it sends in a step.
        actions: the number of computations of the whole pipeline.
    """

    peaks: tuple[float, ...]
    sends: tuple[int, ...]
    actions: int


def check(schedule: Schedule, *, batched: bool = True) -> CheckReport:
    """Check a schedule, with its own communication or, where its lists name none, with the generated one.

    Args:
        schedule: what to check.
        batched: whether it must also make progress with neighbouring messages as one unit.

    Raises:
        ScheduleError: with the grid and the first offending action.
    """
    for rank in range(schedule.pp):
        _check_computations(schedule, rank)
    named = has_communication(schedule)
    if named:
        check_messages(schedule)
        run_order(schedule)
    complete = schedule if named else with_communication(schedule)
    if batched:
        check_batched(complete)
    ops = [[op_of(packed) for packed in complete.codes(rank)] for rank in range(schedule.pp)]
    return CheckReport(
        peaks=peak_microbatches(schedule),
        sends=tuple(sum(op in SENDS for op in row) for row in ops),
        actions=sum(op in COMPUTE for row in ops for op in row),
    )


def _check_computations(schedule: Schedule, rank: int) -> None:
    seen: set[int] = set()
    for step, unit in enumerate(schedule.steps(rank)):
        for packed in unit:
            if text := _order_error(schedule, rank, packed, seen):
                raise error(schedule, text, rank, step)
            seen.add(packed)
    expected = ({Op.F, Op.B}, {Op.F, Op.I, Op.W}) if schedule.backward else ({Op.F},)
    for stage in schedule.rank_stages(rank):
        for microbatch in range(schedule.microbatches):
            done = _done(stage, microbatch, seen)
            if done not in expected:
                absent = "F" if Op.F not in done else "W" if Op.I in done else "B"
                raise error(schedule, f"{stage}{absent}{microbatch} is missing", rank)


def _done(stage: int, microbatch: int | None, seen: set[int]) -> set[Op]:
    return {op for op in COMPUTE if code(op, stage, microbatch) in seen}


def _order_error(schedule: Schedule, rank: int, packed: int, seen: set[int]) -> str | None:
    """What is wrong with one action behind those in `seen`, if anything."""
    op, stage, microbatch = op_of(packed), stage_of(packed), microbatch_of(packed)
    if stage >= schedule.stages or schedule.stage_ranks[stage] != rank:
        return f"{unpack(packed)}: stage {stage} does not live on this rank"
    if microbatch is not None and microbatch >= schedule.microbatches:
        return f"{unpack(packed)}: the step has only {counted(schedule.microbatches, 'microbatch', 'microbatches')}"
    if op not in COMPUTE:
        return None
    if packed in seen:
        return f"{unpack(packed)} stands here a second time"
    return None if op is Op.F else _backward_error(schedule, packed, _done(stage, microbatch, seen))


def _backward_error(schedule: Schedule, packed: int, done: set[Op]) -> str | None:
    action = unpack(packed)
    if not schedule.backward:
        return f"{action}: a schedule of forwards has no backward"
    if Op.F not in done:
        return f"{action} stands before {action.stage}F{action.microbatch}"
    if Op.B in done or (action.op is Op.B and done & {Op.I, Op.W}):
        return f"{action}: this backward stands here a second time (B is I and W in one)"
    if action.op is Op.W and Op.I not in done:
        return f"{action} stands before {action.stage}I{action.microbatch}"
    return None
