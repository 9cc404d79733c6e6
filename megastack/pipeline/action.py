"""One instruction of a pipeline schedule, as a value and as text.

The text form is the one of ``torch.distributed.pipelining`` (``2F0``, ``1SEND_F3``, ``0UNSHARD``,
``(0F1;1B2)OVERLAP_F_B``), so each system can load lists written by the other. Actions define *what* to do and *in which
order*, without tensors, processes or time. Schedules hold them packed into integers (:func:`pack`); ``Action`` is the
readable form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megastack.errors import ScheduleError


class Op(StrEnum):
    """The kinds of actions; the values are used in the text form."""

    F = "F"  # forward
    B = "B"  # full backward: I and W in one
    I = "I"  # gradient of the input  # noqa: E741
    W = "W"  # gradient of the weights
    SEND_F = "SEND_F"  # a stage's output to the next stage
    RECV_F = "RECV_F"  # a stage's input from the previous stage
    SEND_B = "SEND_B"  # a stage's input gradient to the previous stage
    RECV_B = "RECV_B"  # a stage's output gradient from the next stage
    UNSHARD = "UNSHARD"  # gather a stage's parameters
    RESHARD = "RESHARD"  # free the gathered parameters
    REDUCE_GRAD = "REDUCE_GRAD"  # reduce a stage's gradients over data-parallel ranks
    OVERLAP_F_B = "OVERLAP_F_B"  # its parts run as one computation


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
COMMUNICATION = SENDS | RECEIVES
EXECUTED = COMPUTE | COMMUNICATION
"""The actions that the runtime executes; lists may contain others, which are only drawn and checked."""
_WITHOUT_MICROBATCH = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})
_EXAMPLES = "actions look like 2F0, 1SEND_B3, 0UNSHARD or (0F1;1B2)OVERLAP_F_B"


@dataclass(frozen=True, slots=True)
class Action:
    """One instruction: run `op` on `microbatch` of `stage`.

    Args:
        op: the kind of action, or its text.
        stage: global stage number; -1 for ``OVERLAP_F_B``, whose parts have their own.
        microbatch: its number within the step; None for UNSHARD, RESHARD and REDUCE_GRAD.
        parts: for ``OVERLAP_F_B`` only, the actions that run as one computation.

    Raises:
        ScheduleError: the op is unknown, a number is negative, or the op requires or forbids the microbatch or parts.
    """

    op: Op
    stage: int
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        if type(self.op) is not Op:
            object.__setattr__(self, "op", _op(self.op))
        if self.op is Op.OVERLAP_F_B:
            if not self.parts or any(part.op not in COMPUTE for part in self.parts):
                raise ScheduleError(f"{self!s}: OVERLAP_F_B needs parts, each an F, B, I or W", action=self)
        elif self.parts or self.stage < 0 or (self.microbatch is None) != (self.op in _WITHOUT_MICROBATCH):
            raise ScheduleError(f"{self!s} is not an action; {_EXAMPLES}", action=self)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.op.value}"
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """Whether it uses a rank's compute time: F, B, I, W, or several of them as one computation."""
        return self.op in COMPUTE or self.op is Op.OVERLAP_F_B

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form. Raises ScheduleError for any other text."""
        text = text.strip()
        if match := _OVERLAP.fullmatch(text):
            return cls(_op(match[2]), -1, None, tuple(map(cls.parse, match[1].split(";"))))
        if match := _SINGLE.fullmatch(text):
            return cls(_op(match[2]), int(match[1]), int(match[3]) if match[3] else None)
        raise ScheduleError(f"{text!r} is not an action; {_EXAMPLES}")


_SINGLE = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_OVERLAP = re.compile(r"\(([^()]+)\)([A-Z_]+)")


def _op(text: str) -> Op:
    try:
        return Op(text)
    except ValueError:
        raise ScheduleError(f"{text!r} is not an op; use one of {', '.join(Op)}") from None


# Packed form: | joined: 1 | op: 5 | stage: 24 | microbatch + 1: 24 |. An OVERLAP_F_B is stored as its parts,
# each but the last with `joined` set.
OP_SHIFT, STAGE_SHIFT = 48, 24
JOINED = 1 << 53
STAGE = 1 << STAGE_SHIFT  # add it to a code to get the same action of the next stage
_FIELD = (1 << 24) - 1
_OPS = tuple(Op)
_NUMBERS = {op: number for number, op in enumerate(_OPS)}


def code(op: Op, stage: int = 0, microbatch: int | None = None) -> int:
    """One action without parts as an integer."""
    return _NUMBERS[op] << OP_SHIFT | stage << STAGE_SHIFT | (0 if microbatch is None else microbatch + 1)


def pack(action: Action) -> list[int]:
    """The action as integers: one, or one for each part of an OVERLAP_F_B."""
    if action.parts:
        return join([packed for part in action.parts for packed in pack(part)])
    if action.stage > _FIELD or (action.microbatch or 0) >= _FIELD:
        raise ScheduleError(f"{action}: stages and microbatches are numbered below {_FIELD}", action=action)
    return [code(action.op, action.stage, action.microbatch)]


def op_of(packed: int) -> Op:
    """The op of a packed integer."""
    return _OPS[packed >> OP_SHIFT & 31]


def stage_of(packed: int) -> int:
    """The stage of a packed integer."""
    return packed >> STAGE_SHIFT & _FIELD


def microbatch_of(packed: int) -> int | None:
    """The microbatch of a packed integer."""
    return (packed & _FIELD) - 1 if packed & _FIELD else None


def unpack(packed: int) -> Action:
    """The action of one packed integer (a part on its own)."""
    return Action(op_of(packed), stage_of(packed), microbatch_of(packed))


def split_steps(row: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Group a row of packed integers into its steps: one integer each, or the parts of one action."""
    parts: tuple[int, ...] = ()
    for packed in row:
        parts += (packed & ~JOINED,)
        if not packed & JOINED:
            yield parts
            parts = ()


def join(parts: Sequence[int]) -> list[int]:
    """The parts of one step as they are stored in a row; `split_steps` is the inverse."""
    return [packed | JOINED for packed in parts[:-1]] + list(parts[-1:])


def unpack_step(parts: tuple[int, ...]) -> Action:
    """The action of one step."""
    if len(parts) == 1:
        return unpack(parts[0])
    return Action(Op.OVERLAP_F_B, -1, None, tuple(map(unpack, parts)))
