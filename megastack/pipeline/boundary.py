"""What crosses a boundary between two stages: which message carries a computation's output, between which ranks.

A forward's output goes to the next stage, an input gradient to the previous one. Where both stages sit on one rank
there is no message. Everything here is on packed actions (see ``action``).
"""

from __future__ import annotations

from typing import NamedTuple

from megastack.pipeline.action import COMMUNICATION, OP_SHIFT, STAGE, Op, code, op_of, stage_of
from megastack.pipeline.schedule import Schedule

_F, _B, _I = code(Op.F), code(Op.B), code(Op.I)
_SEND_F, _RECV_F, _SEND_B, _RECV_B = code(Op.SEND_F), code(Op.RECV_F), code(Op.SEND_B), code(Op.RECV_B)
_OP = 31 << OP_SHIFT


class Message(NamedTuple):
    """One value on its way: the packed send and receive, and the channel that carries it."""

    send: int
    receive: int
    source: int
    destination: int


def _op_bits(packed: int) -> int:
    return packed & _OP


def value(packed: int) -> int | None:
    """The key of what a computation makes for its neighbour: its own code, with I counted as B; None for W."""
    bits = _op_bits(packed)
    if bits in (_F, _B):
        return packed
    return packed - _I + _B if bits == _I else None


def wanted(schedule: Schedule, packed: int) -> int | None:
    """The key of the value that a computation takes from a neighbouring stage; None at the ends and for W."""
    bits = _op_bits(packed)
    if bits == _F:
        return packed - STAGE if stage_of(packed) else None
    if bits in (_B, _I):
        return packed - bits + _B + STAGE if stage_of(packed) + 1 < schedule.stages else None
    return None


def message(schedule: Schedule, key: int) -> Message | None:
    """The message that carries the value `key`; None where it stays on its rank or nobody takes it."""
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


def carried(packed: int) -> int:
    """The key of the value that a send or receive carries."""
    bits = _op_bits(packed)
    if bits == _SEND_F:
        return packed - _SEND_F + _F
    if bits == _RECV_F:
        return packed - _RECV_F + _F - STAGE
    if bits == _SEND_B:
        return packed - _SEND_B + _B
    assert bits == _RECV_B, f"{packed} is no message"
    return packed - _RECV_B + _B + STAGE


def has_communication(schedule: Schedule) -> bool:
    """Whether the lists name any send or receive."""
    return any(op_of(packed) in COMMUNICATION for rank in range(schedule.pp) for packed in schedule.codes(rank))
