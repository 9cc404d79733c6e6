"""The part of `check` that is about sends and receives.

Two models of a transport. *Posted* (gloo, and any that matches in the background): a send never blocks, a receive is
waited for at its first use; static order and `run_order` decide it. *Batched* (NCCL): the neighbouring messages of a
rank form one unit; units of a rank follow one another; a unit is done once both sides of each of its messages have
started the units that hold them. `with_communication` satisfies both; lists from elsewhere may satisfy only the
first.
"""

from __future__ import annotations

from collections import defaultdict

from megastack.errors import ScheduleError
from megastack.pipeline import progress
from megastack.pipeline.action import COMMUNICATION, COMPUTE, SENDS, Op, op_of, stage_of, unpack
from megastack.pipeline.boundary import Message, carried, message, value, wanted
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import error, stuck


def check_messages(schedule: Schedule) -> None:
    """Each message sent and received once, behind its making and before its use, in the same order on both sides."""
    sends: dict[tuple[int, int], list[Message]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[Message, int]]] = defaultdict(list)
    for rank in range(schedule.pp):
        _check_rank(schedule, rank)
        for step, unit in enumerate(schedule.steps(rank)):
            if op_of(unit[0]) in COMMUNICATION:
                way = _way(schedule, unit[0])
                if op_of(unit[0]) in SENDS:
                    sends[way.source, way.destination].append(way)
                else:
                    receives[way.source, way.destination].append((way, step))
    for (source, destination), sent in sorted(sends.items()):
        for way, (received, step) in zip(sent, receives[source, destination], strict=True):
            if way != received:
                text = f"{unpack(received.receive)} stands where rank {source} sends for {unpack(way.receive)}; the "
                raise error(schedule, f"{text}receives of a pair of ranks follow its sends", destination, step)


def _way(schedule: Schedule, packed: int) -> Message:
    way = message(schedule, carried(packed))
    assert way is not None, f"{unpack(packed)} crosses no boundary"
    return way


def _check_rank(schedule: Schedule, rank: int) -> None:
    seen: set[int] = set()
    sends: set[int] = set()
    receives: set[int] = set()
    for step, unit in enumerate(schedule.steps(rank)):
        for packed in unit:
            if text := _order_error(schedule, packed, seen):
                raise error(schedule, text, rank, step)
        for packed in unit:
            seen.add(packed)
            if (key := wanted(schedule, packed)) is not None and (way := message(schedule, key)):
                receives.add(way.receive)
            if (key := value(packed)) is not None:
                seen.add(key)
                if way := message(schedule, key):
                    sends.add(way.send)
    if absent := sends - seen:
        raise error(schedule, f"{unpack(min(absent))} is missing", rank)
    if extra := {packed for packed in seen if op_of(packed) in COMMUNICATION} - sends - receives:
        raise error(schedule, f"{unpack(min(extra))} carries nothing that is used", rank)


def _order_error(schedule: Schedule, packed: int, seen: set[int]) -> str | None:
    """What is wrong with one action behind those in `seen`, if anything."""
    if op_of(packed) in COMPUTE:
        key = wanted(schedule, packed)
        way = message(schedule, key) if key is not None else None
        return f"{unpack(packed)} stands before {unpack(way.receive)}" if way and way.receive not in seen else None
    if op_of(packed) not in COMMUNICATION:
        return None
    if not _crosses(schedule, packed):
        return f"{unpack(packed)} crosses no boundary between two ranks"
    if packed in seen:
        return f"{unpack(packed)} stands here a second time"
    if op_of(packed) in SENDS and carried(packed) not in seen:
        return f"{unpack(packed)} stands before {unpack(carried(packed))}"
    return None


def _crosses(schedule: Schedule, packed: int) -> bool:
    outside = {Op.RECV_F: 0, Op.RECV_B: schedule.stages - 1}
    return outside.get(op_of(packed)) != stage_of(packed) and message(schedule, carried(packed)) is not None


def check_batched(schedule: Schedule) -> None:
    """Progress with neighbouring messages as one unit. Raises ScheduleError with the ranks that wait for each other."""
    units = [_message_units(schedule, rank) for rank in range(schedule.pp)]
    home = {packed: (rank, first) for rank, found in enumerate(units) for first, unit in found for packed in unit}
    rows = [_compute_row(schedule, rank, home) for rank in range(schedule.pp)]
    rows += [_transport_row(schedule, rank, units[rank], home) for rank in range(schedule.pp)]
    reached = progress.run(rows)
    if reached.missing:
        raise _batched_error(schedule, units, rows, reached)


def _message_units(schedule: Schedule, rank: int) -> list[tuple[int, list[int]]]:
    """(step of the first, packed messages) of each run of neighbouring messages."""
    found: list[tuple[int, list[int]]] = []
    neighbours = False
    for step, unit in enumerate(schedule.steps(rank)):
        is_message = op_of(unit[0]) in COMMUNICATION
        if is_message and neighbours:
            found[-1][1].append(unit[0])
        elif is_message:
            found.append((step, [unit[0]]))
        neighbours = is_message
    return found


def _compute_row(schedule: Schedule, rank: int, home: dict[int, tuple[int, int]]) -> list[progress.Step]:
    """The rank itself: it posts units without waiting, and a computation waits for the unit of its receive."""
    row = []
    for step, unit in enumerate(schedule.steps(rank)):
        ways = [message(schedule, key) for packed in unit if (key := wanted(schedule, packed)) is not None]
        needs = tuple(("done", *home[way.receive]) for way in ways if way)
        row.append(progress.Step(needs, (("posted", rank, step),)))
    return row


def _transport_row(
    schedule: Schedule, rank: int, units: list[tuple[int, list[int]]], home: dict[int, tuple[int, int]]
) -> list[progress.Step]:
    """The rank's transport: two steps a unit, its start and its end."""
    row = []
    for first, unit in units:
        ways = [_way(schedule, packed) for packed in unit]
        partners = {home[way.receive if way.source == rank else way.send] for way in ways}
        row.append(progress.Step((("posted", rank, first),), (("started", rank, first),)))
        row.append(progress.Step(tuple(("started", *partner) for partner in partners), (("done", rank, first),)))
    return row


def _batched_error(
    schedule: Schedule,
    units: list[list[tuple[int, list[int]]]],
    rows: list[list[progress.Step]],
    reached: progress.Progress,
) -> ScheduleError:
    """The cycle in terms of the ranks' own lists: a stuck transport stands at the first message of its unit."""
    positions: dict[int, int] = {}
    cycle: list[int] = []
    for row in reached.cycle(rows):
        rank = row % schedule.pp
        at = reached.positions[row]
        positions[rank] = units[rank][at // 2][0] if row >= schedule.pp else at
        if rank not in cycle:
            cycle.append(rank)
    return stuck(schedule, cycle, positions, "a unit of messages")
