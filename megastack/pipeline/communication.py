"""The pass that adds sends and receives to a schedule of computations.

There is one first-in-first-out channel for each (source, destination) pair of ranks, forwards and backwards alike,
with no tags: the k-th send of a pair is matched by its k-th receive. A send is posted and blocks nothing; a receive
is posted and waited for at its first use. A boundary between two stages of one rank is neither sent nor received.

The pass times the computations with equal costs and puts all messages of the pipeline in the one order in which they
are sent there. A send stands right behind the computation that makes its value. Its receive stands before the
computation that the other rank would be running at that moment, so it is posted early and the value travels under
computation. Since every rank names its messages in the same global order, no ring of ranks can wait for each other,
even on a transport that blocks until both sides are there, or that runs neighbouring messages as one unit (NCCL).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from megastack.errors import ScheduleError
from megastack.pipeline.action import COMPUTE, join, op_of
from megastack.pipeline.boundary import has_communication, message, value
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import Costs, simulate


class _Posting(NamedTuple):
    """One side of a message: behind how many computations of its rank it stands, and the global order of messages."""

    slot: int
    time: float
    send: int
    packed: int


def with_communication(schedule: Schedule, *, ahead: int = 0) -> Schedule:
    """The same schedule with its sends and receives.

    Args:
        schedule: lists of computations.
        ahead: post each receive this many computations earlier still. That hides a slow hand-shake on transports that
            match in the background (gloo); it gives up the global order, so batching transports need 0.

    Raises:
        ScheduleError: when the lists already name a send or a receive, or the computations alone cannot finish.
    """
    if has_communication(schedule):
        raise ScheduleError(f"{schedule.name}: the schedule names its sends and receives already; use it as it is")
    steps = [schedule.steps(rank) for rank in range(schedule.pp)]
    ends = _ends(schedule, steps)
    postings: list[list[_Posting]] = [[] for _ in range(schedule.pp)]
    for rank in range(schedule.pp):
        computations = (unit for unit in steps[rank] if op_of(unit[0]) in COMPUTE)
        for number, (unit, end) in enumerate(zip(computations, ends[rank], strict=True), 1):
            for packed in unit:
                if (key := value(packed)) is not None and (way := message(schedule, key)):
                    slot = max(0, bisect_right(ends[way.destination], end) - ahead)
                    postings[rank].append(_Posting(number, end, way.send, way.send))
                    postings[way.destination].append(_Posting(slot, end, way.send, way.receive))
    rows = (_merge(steps[rank], sorted(postings[rank])) for rank in range(schedule.pp))
    return replace(schedule, packed=tuple(array("q", row).tobytes() for row in rows))


def _ends(schedule: Schedule, steps: list[list[tuple[int, ...]]]) -> list[list[float]]:
    """When each computation (a unit of parts is one) of each rank ends at equal costs."""
    # Whole numbers: each chunk takes 1 for each of F, I and W, so equal moments compare equal.
    cost = float(schedule.chunks)
    times = simulate(schedule, Costs(cost, cost, cost)).times
    last = [accumulate(len(unit) for unit in row if op_of(unit[0]) in COMPUTE) for row in steps]
    return [[times[rank][2 * parts - 1] for parts in last[rank]] for rank in range(schedule.pp)]


def _merge(steps: list[tuple[int, ...]], postings: list[_Posting]) -> Iterator[int]:
    """The rank's steps with each message right behind the computations of its slot."""
    waiting = deque(postings)
    done = 0
    while waiting and waiting[0].slot == 0:
        yield waiting.popleft().packed
    for unit in steps:
        yield from join(unit)
        done += op_of(unit[0]) in COMPUTE
        while waiting and waiting[0].slot == done and op_of(unit[0]) in COMPUTE:
            yield waiting.popleft().packed
