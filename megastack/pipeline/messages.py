"""Messages between stages: the computation that sends an output, and the rank that receives it.

A forward sends its output to the next stage, and a backward sends its input gradient to the previous one. There is no
message between two stages on one rank. An output is identified by its *key*, the packed action that computes it (see
``action``), with I counted as B.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from megastack.pipeline.action import COMMUNICATION, OP_SHIFT, SENDS, STAGE, Op, code, op_of, stage_of
from megastack.pipeline.schedule import Schedule

_F, _B, _I = code(Op.F), code(Op.B), code(Op.I)
_SEND_F, _RECV_F, _SEND_B, _RECV_B = code(Op.SEND_F), code(Op.RECV_F), code(Op.SEND_B), code(Op.RECV_B)
_OP = 31 << OP_SHIFT


MAX_POSTED_SENDS = 2
"""The most sends that a rank keeps on a channel where the host runs ahead of its messages (NCCL)."""


class Message(NamedTuple):
    """The packed send and receive of one output, and the channel between their ranks."""

    send: int
    receive: int
    source: int
    destination: int


def _op_bits(packed: int) -> int:
    return packed & _OP


def output_key(packed: int) -> int | None:
    """The key of the output that a computation produces for a neighbouring stage; None for W."""
    bits = _op_bits(packed)
    if bits in (_F, _B):
        return packed
    return packed - _I + _B if bits == _I else None


def input_key(schedule: Schedule, packed: int) -> int | None:
    """The key of the output of a neighbouring stage that a computation needs; None at the ends and for W."""
    bits = _op_bits(packed)
    if bits == _F:
        return packed - STAGE if stage_of(packed) else None
    if bits in (_B, _I):
        return packed - bits + _B + STAGE if stage_of(packed) + 1 < schedule.stages else None
    return None


def message_of(schedule: Schedule, key: int) -> Message | None:
    """The message for an output; None if both stages are on one rank, or no stage needs it."""
    forward = _op_bits(key) == _F
    stage = stage_of(key)
    to = stage + 1 if forward else stage - 1
    if not 0 <= to < schedule.stages:
        return None
    source, destination = schedule.stage_ranks[stage], schedule.stage_ranks[to]
    if source == destination:
        return None
    if forward:
        return Message(key - _F + _SEND_F, key - _F + _RECV_F + STAGE, source, destination)
    return Message(key - _B + _SEND_B, key - _B + _RECV_B - STAGE, source, destination)


def payload_key(packed: int) -> int:
    """The key of the output that is sent or received."""
    bits = _op_bits(packed)
    if bits == _SEND_F:
        return packed - _SEND_F + _F
    if bits == _RECV_F:
        return packed - _RECV_F + _F - STAGE
    if bits == _SEND_B:
        return packed - _SEND_B + _B
    assert bits == _RECV_B, f"{packed} is not a message"
    return packed - _RECV_B + _B + STAGE


def has_communication(schedule: Schedule) -> bool:
    """Whether the lists contain any send or receive."""
    return any(op_of(packed) in COMMUNICATION for rank in range(schedule.pp) for packed in schedule.codes(rank))


def waited_sends(schedule: Schedule, rank: int) -> Iterator[tuple[int, Message]]:
    """(step of a send, the earlier message of its channel that is waited for before it is posted).

    A channel holds `MAX_POSTED_SENDS` sends, so the k-th send of a channel waits for send k - `MAX_POSTED_SENDS`.
    """
    channels: dict[int, list[Message]] = defaultdict(list)
    for step, (packed, *_) in enumerate(schedule.steps(rank)):
        if op_of(packed) in SENDS and (message := message_of(schedule, payload_key(packed))):
            sent = channels[message.destination]
            sent.append(message)
            if len(sent) > MAX_POSTED_SENDS:
                yield step, sent[-1 - MAX_POSTED_SENDS]


def peak_messages(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of messages alive at once, for each rank of a schedule with communication.

    A sent message is alive from its send until the send that waits for it (see `waited_sends`) or else the end of the
    step. A received message is alive from its receive until the computation that uses it, whose activation it becomes.
    """
    return tuple(_peak_messages(schedule, rank) for rank in range(schedule.pp))


def _peak_messages(schedule: Schedule, rank: int) -> int:
    waits = dict(waited_sends(schedule, rank))
    alive: set[int] = set()
    peak = 0
    for step, parts in enumerate(schedule.steps(rank)):
        if step in waits:
            alive.remove(waits[step].send)
        for packed in parts:
            if op_of(packed) in COMMUNICATION:
                alive.add(packed)
            elif (key := input_key(schedule, packed)) is not None and (used := message_of(schedule, key)):
                alive.remove(used.receive)
        peak = max(peak, len(alive))
    return peak
