"""The pass that adds sends and receives to a schedule of computations.

There is one first-in-first-out channel for each (source, destination) pair of ranks, without tags: the k-th send of a
pair is matched by its k-th receive. A posted send never blocks; a posted receive is waited for at its first use.
Nothing is sent between two stages of one rank.

The pass times the computations with equal costs, and orders all messages of the pipeline by the time at which they are
sent. A send comes right after the computation of its output. Its receive comes before the computation that the other
rank would be running at that time, so it is posted early and the transfer overlaps with computation. Since every rank
lists its messages in the same global order, ranks cannot wait for each other in a cycle, even on a transport that
blocks until both sides are present, or that runs adjacent messages as one group (NCCL).
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
from megastack.pipeline.messages import has_communication, message_of, output_key
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import Costs, simulate


class _Posting(NamedTuple):
    """One side of a message: the number of computations of its rank before it, and its position in the global order."""

    position: int
    time: float
    send: int
    packed: int


def with_communication(schedule: Schedule, *, receive_lead: int = 0) -> Schedule:
    """The same schedule with its sends and receives.

    Args:
        schedule: lists of computations.
        receive_lead: post each receive earlier by this many computations. That hides a slow handshake on transports
            that match in the background (gloo), but breaks the global order, so batching transports need 0.

    Raises:
        ScheduleError: the lists already contain a send or a receive, or the computations alone cannot finish.
    """
    if has_communication(schedule):
        raise ScheduleError(f"{schedule.name}: the schedule already lists its sends and receives; use it unchanged")
    steps = [schedule.steps(rank) for rank in range(schedule.pp)]
    ends = _ends(schedule, steps)
    postings: list[list[_Posting]] = [[] for _ in range(schedule.pp)]
    for rank in range(schedule.pp):
        computations = (parts for parts in steps[rank] if op_of(parts[0]) in COMPUTE)
        for number, (parts, end) in enumerate(zip(computations, ends[rank], strict=True), 1):
            for packed in parts:
                if (key := output_key(packed)) is not None and (sent := message_of(schedule, key)):
                    position = max(0, bisect_right(ends[sent.destination], end) - receive_lead)
                    postings[rank].append(_Posting(number, end, sent.send, sent.send))
                    postings[sent.destination].append(_Posting(position, end, sent.send, sent.receive))
    rows = (_merge(steps[rank], sorted(postings[rank])) for rank in range(schedule.pp))
    return replace(schedule, packed=tuple(array("q", row).tobytes() for row in rows))


def _ends(schedule: Schedule, steps: list[list[tuple[int, ...]]]) -> list[list[float]]:
    """The end time of each computation of each rank at equal costs; an action with parts is one computation."""
    # Integers: each chunk takes 1 for each of F, I and W, so equal times compare equal.
    cost = float(schedule.chunks)
    times = simulate(schedule, Costs(cost, cost, cost)).times
    last = [accumulate(len(parts) for parts in row if op_of(parts[0]) in COMPUTE) for row in steps]
    return [[times[rank][2 * count - 1] for count in last[rank]] for rank in range(schedule.pp)]


def _merge(steps: list[tuple[int, ...]], postings: list[_Posting]) -> Iterator[int]:
    """The rank's steps, with each message right after the computations before its position."""
    waiting = deque(postings)
    done = 0
    while waiting and waiting[0].position == 0:
        yield waiting.popleft().packed
    for parts in steps:
        yield from join(parts)
        done += op_of(parts[0]) in COMPUTE
        while waiting and waiting[0].position == done and op_of(parts[0]) in COMPUTE:
            yield waiting.popleft().packed
