"""Simulates a schedule: when each action would run, given durations and link latencies.

This is an event simulation of the runtime: a rank runs its list in order, a computation starts when its rank is free
and its input has arrived, a send uses no compute time, and a message arrives `p2p` after it was sent. Messages do not
contend. Both bubbles are the share of time in which the busiest rank does not compute:

- `bubble`: of the longest span of a rank, from its first start to its last end; closed forms refer to it.
- `step_bubble`: of the whole step, from the first start of any rank to the last end of any rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megastack.errors import ScheduleError, counted
from megastack.pipeline import progress
from megastack.pipeline.action import COMPUTE, SENDS, Action, Op, op_of, stage_of, unpack, unpack_step
from megastack.pipeline.activations import peak_microbatches
from megastack.pipeline.grid import grid
from megastack.pipeline.messages import has_communication, input_key, message_of, output_key, payload_key
from megastack.pipeline.schedule import Schedule

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Durations, in any unit of time.

    Args:
        F: the forward of one microbatch. Either a number for a whole rank, of which each of its v chunks takes 1/v, or
            a sequence of one number for each stage.
        I: gradient of the input, likewise.
        W: gradient of the weights, likewise. A full backward takes I + W.
        p2p: latency of a message to another rank; a number, or one for each (source, destination).
        weight_share: the part of an activation that W still needs after I.
    """

    F: PerStage = 1.0
    I: PerStage = 1.0  # noqa: E741
    W: PerStage = 1.0
    p2p: float | Mapping[tuple[int, int], float] = 0.0
    weight_share: float = 1.0

    def of_stages(self, schedule: Schedule) -> dict[Op, list[float]]:
        """For each computing op, its duration on each stage.

        Raises:
            ScheduleError: a sequence does not have one number for each stage.
        """
        forward, inputs, weights = (_of_stages(schedule, getattr(self, name), name) for name in ("F", "I", "W"))
        full = [i + w for i, w in zip(inputs, weights, strict=True)]
        return {Op.F: forward, Op.I: inputs, Op.W: weights, Op.B: full}

    def latency(self, source: int, destination: int) -> float:
        """The time of a message between two ranks."""
        return self.p2p[source, destination] if isinstance(self.p2p, Mapping) else self.p2p


def _of_stages(schedule: Schedule, cost: PerStage, name: str) -> list[float]:
    if isinstance(cost, Sequence):
        if len(cost) != schedule.stages:
            raise ScheduleError(
                f"Costs.{name}: has {counted(len(cost), 'number')}; "
                f"use one for each of {counted(schedule.stages, 'stage')}"
            )
        return list(cost)
    return [cost / schedule.chunks] * schedule.stages


class Span(NamedTuple):
    """The interval in which one action runs on its rank; the parts of an OVERLAP_F_B are consecutive spans."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A timed schedule.

    Attributes:
        schedule: the schedule.
        bubble: idle share of the longest rank span (see the module's docstring).
        step_bubble: idle share of the makespan.
        peaks: for each rank, the most activations alive, in microbatches of the whole rank.
        makespan: the time from the first start to the last end.
        times: for each rank, start and end of each computation in order.
    """

    schedule: Schedule
    bubble: float
    step_bubble: float
    peaks: tuple[float, ...]
    makespan: float
    times: tuple[Sequence[float], ...] = field(repr=False)

    @property
    def spans(self) -> list[Span]:
        """The span of each computation, rank by rank in order."""
        return [span for rank in range(self.schedule.pp) for span in self.rank_spans(rank)]

    def rank_spans(self, rank: int) -> list[Span]:
        """The span of each computation of one rank, in order."""
        computations = [packed for parts in self.schedule.steps(rank) for packed in parts if op_of(packed) in COMPUTE]
        times = self.times[rank]
        return [Span(rank, unpack(packed), times[2 * i], times[2 * i + 1]) for i, packed in enumerate(computations)]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Time a schedule, with or without its communication; `costs` default to ``Costs()``.

    Raises:
        ScheduleError: the ranks deadlock; the grid marks the action at which each of them waits.
    """
    costs = costs or Costs()
    order = run_order(schedule)
    times = _times(schedule, costs, order)
    busy = max((sum(row[1::2]) - sum(row[::2]) for row in times), default=0.0)
    spans = [(row[0], row[-1]) for row in times if row]
    longest = max((end - start for start, end in spans), default=0.0)
    makespan = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    return Timeline(
        schedule=schedule,
        bubble=max(0.0, 1 - busy / longest) if longest else 0.0,
        step_bubble=max(0.0, 1 - busy / makespan) if makespan else 0.0,
        peaks=peak_microbatches(schedule, costs.weight_share),
        makespan=makespan,
        times=tuple(times),
    )


def run_order(schedule: Schedule) -> list[tuple[int, int]]:
    """(rank, step) of the whole schedule in a possible order. Raises ScheduleError if there is none."""
    rows = _rows(schedule)
    reached = progress.run(rows)
    if reached.missing:
        raise stuck(schedule, reached.cycle(rows), dict(enumerate(reached.positions)), "an output of another stage")
    return reached.order


def error(schedule: Schedule, text: str, rank: int, step: int | None = None) -> ScheduleError:
    """The error for one action of a rank's list, marked in the grid; without a step, for an action that is missing."""
    rows = schedule.ranks
    action = None if step is None else rows[rank][step]
    where = f"rank {rank}" if step is None else f"rank {rank}, step {step}"
    marked = grid(rows, (rank, len(rows[rank]) if step is None else step))
    return ScheduleError(f"{where}: {text}", marked, action)


def stuck(schedule: Schedule, cycle: Sequence[int], positions: Mapping[int, int], missing: str) -> ScheduleError:
    """The error for ranks that wait for one another, the first of `cycle` marked as offending."""
    actions = [unpack_step(schedule.steps(rank)[positions[rank]]) for rank in cycle]
    chain = ", which waits for ".join(f"rank {rank} at {action}" for rank, action in zip(cycle, actions, strict=True))
    end = f", which waits for rank {cycle[0]}" if len(cycle) > 1 else f" waits for {missing} that never comes"
    rows = schedule.ranks
    waiting = {rank: step for rank, step in positions.items() if step < len(rows[rank])}
    marked = grid(rows, (cycle[0], positions[cycle[0]]), waiting)
    return ScheduleError(f"no progress: {chain}{end}", marked, actions[0])


def _rows(schedule: Schedule) -> list[list[progress.Step]]:
    """The keys that each step needs and provides: outputs, or packed sends if the lists contain them."""
    sent = has_communication(schedule)
    return [[_step(schedule, parts, sent) for parts in schedule.steps(rank)] for rank in range(schedule.pp)]


def _step(schedule: Schedule, parts: tuple[int, ...], sent: bool) -> progress.Step:
    needs: list[Hashable] = []
    provides: list[Hashable] = []
    for packed in parts:
        op = op_of(packed)
        if op in COMPUTE:
            key, made = input_key(schedule, packed), output_key(packed)
            if key is not None:
                message = message_of(schedule, key) if sent else None
                needs.append(message.send if message else key)
            if made is not None:
                provides.append(made)
        elif op in SENDS:
            provides.append(packed)
    return progress.Step(tuple(needs), tuple(provides))


def _times(schedule: Schedule, costs: Costs, order: Sequence[tuple[int, int]]) -> list[array[float]]:
    durations = costs.of_stages(schedule)
    steps = [schedule.steps(rank) for rank in range(schedule.pp)]
    sent = has_communication(schedule)
    clocks = [0.0] * schedule.pp
    arrivals: dict[int, float] = {}
    times: list[array[float]] = [array("d") for _ in range(schedule.pp)]
    for rank, position in order:
        parts = steps[rank][position]
        inputs = (arrivals.get(key, 0.0) for packed in parts if (key := input_key(schedule, packed)) is not None)
        clock = max(clocks[rank], *inputs, 0.0)
        made = []
        for packed in parts:
            op = op_of(packed)
            if op in SENDS:
                key = payload_key(packed)
                message = message_of(schedule, key)
                arrivals[key] = clock + (costs.latency(message.source, message.destination) if message else 0.0)
            elif op in COMPUTE:
                times[rank].append(clock)
                clock += durations[op][stage_of(packed)]
                times[rank].append(clock)
                made.append(output_key(packed))
        for key in made:
            if key is not None and not ((message := message_of(schedule, key)) and sent):
                arrivals[key] = clock + (costs.latency(message.source, message.destination) if message else 0.0)
        clocks[rank] = clock
    return times
