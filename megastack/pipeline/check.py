"""Prove that a schedule is complete, ordered and free of deadlocks before it runs.

Three properties are checked in turn. Every (stage, microbatch) has one F and one B, or one I and one W, on the stage's
rank and after the actions that they depend on. Sends match receives in first-in-first-out order. Ranks make progress
under two models of a transport. *Posted* (gloo, and any transport that matches in the background): a send never blocks
and a receive is waited for at its first use. *Batched* (NCCL): the adjacent messages of a rank form a group; the groups
of a rank run one after another, and a group is complete once the peers of all its messages have started their groups.
The stream that computes waits for an earlier send of the channel before each send, so that few messages are alive.
`with_communication` satisfies both; external lists may satisfy only the first. The first error raises a ScheduleError
that shows the lists as a grid of ranks and steps, with the offending action marked.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megastack.errors import ScheduleError, counted
from megastack.pipeline import progress
from megastack.pipeline.action import (
    COMMUNICATION,
    COMPUTE,
    SENDS,
    Op,
    code,
    microbatch_of,
    op_of,
    stage_of,
    unpack,
)
from megastack.pipeline.activations import peak_microbatches
from megastack.pipeline.communication import with_communication
from megastack.pipeline.messages import (
    Message,
    has_communication,
    input_key,
    message_of,
    output_key,
    payload_key,
    peak_messages,
    waited_sends,
)
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import error, run_order, stuck


@dataclass(frozen=True)
class CheckReport:
    """Figures of a valid schedule.

    Attributes:
        peaks: for each rank, the most activations alive, in microbatches of the whole rank (chunk activations over v).
        sends: for each rank, the number of messages that it sends in a step.
        messages: for each rank, the most messages alive at once on a transport that runs behind the host (NCCL): sent
            and not yet waited for, or received and not yet used; see
            :func:`~megastack.pipeline.messages.peak_messages`. One message has the size of a stage's output.
        actions: the number of computations of the whole pipeline.
    """

    peaks: tuple[float, ...]
    sends: tuple[int, ...]
    messages: tuple[int, ...]
    actions: int


def check(schedule: Schedule, *, batched: bool = True) -> CheckReport:
    """Check a schedule, with its own communication or, if its lists contain none, with generated communication.

    Args:
        schedule: the schedule.
        batched: whether it must also make progress when adjacent messages run as one group.

    Raises:
        ScheduleError: the schedule is invalid; the message shows the grid and the first offending action.
    """
    for rank in range(schedule.pp):
        _check_computations(schedule, rank)
    has_own = has_communication(schedule)
    if has_own:
        _check_messages(schedule)
        run_order(schedule)
    complete = schedule if has_own else with_communication(schedule)
    if batched:
        _check_batched(complete)
    ops = [[op_of(packed) for packed in complete.codes(rank)] for rank in range(schedule.pp)]
    return CheckReport(
        peaks=peak_microbatches(schedule),
        sends=tuple(sum(op in SENDS for op in row) for row in ops),
        messages=peak_messages(complete),
        actions=sum(op in COMPUTE for row in ops for op in row),
    )


def _check_computations(schedule: Schedule, rank: int) -> None:
    seen: set[int] = set()
    for step, parts in enumerate(schedule.steps(rank)):
        for packed in parts:
            if text := _computation_error(schedule, rank, packed, seen):
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


def _computation_error(schedule: Schedule, rank: int, packed: int, seen: set[int]) -> str | None:
    """The error of one action after those in `seen`, if any."""
    op, stage, microbatch = op_of(packed), stage_of(packed), microbatch_of(packed)
    if stage >= schedule.stages or schedule.stage_ranks[stage] != rank:
        return f"{unpack(packed)}: stage {stage} is not on this rank"
    if microbatch is not None and microbatch >= schedule.microbatches:
        return f"{unpack(packed)}: the step has only {counted(schedule.microbatches, 'microbatch', 'microbatches')}"
    if op not in COMPUTE:
        return None
    if packed in seen:
        return f"{unpack(packed)} is repeated"
    return None if op is Op.F else _backward_error(schedule, packed, _done(stage, microbatch, seen))


def _backward_error(schedule: Schedule, packed: int, done: set[Op]) -> str | None:
    action = unpack(packed)
    if not schedule.backward:
        return f"{action}: a schedule of forwards has no backward"
    if Op.F not in done:
        return f"{action} comes before {action.stage}F{action.microbatch}"
    if Op.B in done or (action.op is Op.B and done & {Op.I, Op.W}):
        return f"{action}: this backward is repeated (B is I and W)"
    if action.op is Op.W and Op.I not in done:
        return f"{action} comes before {action.stage}I{action.microbatch}"
    return None


def _check_messages(schedule: Schedule) -> None:
    """Check that each message is sent and received once, between computation and use, in one order on both ranks."""
    sends: dict[tuple[int, int], list[Message]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[Message, int]]] = defaultdict(list)
    for rank in range(schedule.pp):
        _check_rank_messages(schedule, rank)
        for step, (packed, *_) in enumerate(schedule.steps(rank)):
            if op_of(packed) in COMMUNICATION:
                message = _message(schedule, packed)
                if op_of(packed) in SENDS:
                    sends[message.source, message.destination].append(message)
                else:
                    receives[message.source, message.destination].append((message, step))
    for (source, destination), sent in sorted(sends.items()):
        for message, (received, step) in zip(sent, receives[source, destination], strict=True):
            if message != received:
                text = f"{unpack(received.receive)} is where rank {source} sends for {unpack(message.receive)}; the "
                raise error(schedule, f"{text}receives of a pair of ranks must follow its sends", destination, step)


def _message(schedule: Schedule, packed: int) -> Message:
    """The message of a send or receive."""
    message = message_of(schedule, payload_key(packed))
    assert message is not None, f"{unpack(packed)} is not between two ranks"
    return message


def _check_rank_messages(schedule: Schedule, rank: int) -> None:
    seen: set[int] = set()
    sends: set[int] = set()
    receives: set[int] = set()
    for step, parts in enumerate(schedule.steps(rank)):
        for packed in parts:
            if text := _message_error(schedule, packed, seen):
                raise error(schedule, text, rank, step)
        for packed in parts:
            seen.add(packed)
            if (key := input_key(schedule, packed)) is not None and (message := message_of(schedule, key)):
                receives.add(message.receive)
            if (key := output_key(packed)) is not None:
                seen.add(key)
                if message := message_of(schedule, key):
                    sends.add(message.send)
    if absent := sends - seen:
        raise error(schedule, f"{unpack(min(absent))} is missing", rank)
    if extra := {packed for packed in seen if op_of(packed) in COMMUNICATION} - sends - receives:
        raise error(schedule, f"{unpack(min(extra))} has no matching use", rank)


def _message_error(schedule: Schedule, packed: int, seen: set[int]) -> str | None:
    """The error of one action after those in `seen`, if any."""
    if op_of(packed) in COMPUTE:
        key = input_key(schedule, packed)
        message = message_of(schedule, key) if key is not None else None
        if message is None or message.receive in seen:
            return None
        return f"{unpack(packed)} comes before {unpack(message.receive)}"
    if op_of(packed) not in COMMUNICATION:
        return None
    if not _is_between_ranks(schedule, packed):
        return f"{unpack(packed)} is not between two ranks"
    if packed in seen:
        return f"{unpack(packed)} is repeated"
    if op_of(packed) in SENDS and payload_key(packed) not in seen:
        return f"{unpack(packed)} comes before {unpack(payload_key(packed))}"
    return None


def _is_between_ranks(schedule: Schedule, packed: int) -> bool:
    outside = {Op.RECV_F: 0, Op.RECV_B: schedule.stages - 1}
    return outside.get(op_of(packed)) != stage_of(packed) and message_of(schedule, payload_key(packed)) is not None


def _check_batched(schedule: Schedule) -> None:
    """Check progress with adjacent messages as one group. Raises ScheduleError with the ranks in the cycle."""
    groups = [_message_groups(schedule, rank) for rank in range(schedule.pp)]
    home = {packed: (rank, first) for rank, found in enumerate(groups) for first, group in found for packed in group}
    rows = [_compute_row(schedule, rank, home) for rank in range(schedule.pp)]
    rows += [_transport_row(schedule, rank, groups[rank], home) for rank in range(schedule.pp)]
    reached = progress.run(rows)
    if reached.missing:
        raise _batched_error(schedule, groups, rows, reached)


def _message_groups(schedule: Schedule, rank: int) -> list[tuple[int, list[int]]]:
    """(step of the first, packed messages) of each run of adjacent messages."""
    found: list[tuple[int, list[int]]] = []
    adjacent = False
    for step, (packed, *_) in enumerate(schedule.steps(rank)):
        is_message = op_of(packed) in COMMUNICATION
        if is_message and adjacent:
            found[-1][1].append(packed)
        elif is_message:
            found.append((step, [packed]))
        adjacent = is_message
    return found


def _compute_row(schedule: Schedule, rank: int, home: dict[int, tuple[int, int]]) -> list[progress.Step]:
    """The rank itself: a computation waits for the group of its receive, a send for an earlier send of its channel."""
    waits = dict(waited_sends(schedule, rank))
    row = []
    for step, parts in enumerate(schedule.steps(rank)):
        messages = [message_of(schedule, key) for packed in parts if (key := input_key(schedule, packed)) is not None]
        needs = tuple(("done", *home[message.receive]) for message in messages if message)
        if step in waits:
            needs += tuple(("started", *home[end]) for end in (waits[step].send, waits[step].receive))
        row.append(progress.Step(needs, (("posted", rank, step),)))
    return row


def _transport_row(
    schedule: Schedule, rank: int, groups: list[tuple[int, list[int]]], home: dict[int, tuple[int, int]]
) -> list[progress.Step]:
    """The rank's transport: two steps per group, its start and its end."""
    row = []
    for first, group in groups:
        messages = [_message(schedule, packed) for packed in group]
        peers = {home[message.receive if message.source == rank else message.send] for message in messages}
        row.append(progress.Step((("posted", rank, first),), (("started", rank, first),)))
        row.append(progress.Step(tuple(("started", *peer) for peer in peers), (("done", rank, first),)))
    return row


def _batched_error(
    schedule: Schedule,
    groups: list[list[tuple[int, list[int]]]],
    rows: list[list[progress.Step]],
    reached: progress.PossibleOrder,
) -> ScheduleError:
    """The cycle in the ranks' own lists; a stuck transport is shown at the first message of its group."""
    positions: dict[int, int] = {}
    cycle: list[int] = []
    for row in reached.cycle(rows):
        rank = row % schedule.pp
        at = reached.positions[row]
        positions[rank] = groups[rank][at // 2][0] if row >= schedule.pp else at
        if rank not in cycle:
            cycle.append(rank)
    return stuck(schedule, cycle, positions, "a group of messages")
