"""A pipeline schedule as a small frozen value: for each rank, the list of its actions in order.

It can be printed, saved, checked, simulated, drawn and executed, always from the same value. It holds no durations and
no tensors. ``stage_ranks`` maps each stage to its rank, so no other code depends on whether stages are assigned to
ranks in a loop or in a V.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from os import PathLike

from megastack.errors import ScheduleError
from megastack.pipeline.action import COMPUTE, Action, Op, pack, split_steps, unpack_step
from megastack.pipeline.grid import grid


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of one pipeline for one step; make one with `from_actions` or `build_schedule`.

    Attributes:
        name: a human-readable label.
        pp: the number of ranks of the pipeline.
        chunks: the number of stages per rank (the maximum over ranks).
        microbatches: the number of microbatches in one step.
        stage_ranks: the rank of each stage.
        packed: for each rank, its actions as packed 64-bit integers (see ``action.pack``).
        backward: False for a schedule of forwards only.
    """

    name: str
    pp: int
    chunks: int
    microbatches: int
    stage_ranks: tuple[int, ...]
    packed: tuple[bytes, ...] = field(repr=False)
    backward: bool = True

    @classmethod
    def from_actions(
        cls,
        rows: Sequence[Sequence[Action | str]],
        *,
        name: str = "custom",
        microbatches: int | None = None,
        backward: bool = True,
    ) -> Schedule:
        """Pack lists of actions or of their text form, one list per rank, and derive the rank of each stage from them.

        Raises:
            ScheduleError: a text is not an action, a stage is on two ranks, or a stage is missing although a later one
                exists.
        """
        actions = [[Action.parse(action) if isinstance(action, str) else action for action in row] for row in rows]
        stage_ranks = _stage_ranks(actions)
        if microbatches is None:
            microbatches = 1 + max((part.microbatch or 0 for row in actions for part in _parts(row)), default=-1)
        packed = tuple(array("q", (code for action in row for code in pack(action))).tobytes() for row in actions)
        chunks = max(stage_ranks.count(rank) for rank in range(len(rows)))
        return cls(name, len(rows), chunks, microbatches, stage_ranks, packed, backward)

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return len(self.stage_ranks)

    @property
    def ranks(self) -> list[list[Action]]:
        """For each rank, its actions in order, as new lists."""
        return [[unpack_step(parts) for parts in split_steps(self.codes(rank))] for rank in range(self.pp)]

    @property
    def splits_backward(self) -> bool:
        """Whether there are W actions, which compute weight gradients apart from the backward of the inputs."""
        return any(part.op is Op.W for row in self.ranks for part in _parts(row))

    def codes(self, rank: int) -> memoryview:
        """The packed integers of one rank."""
        return memoryview(self.packed[rank]).cast("q")

    def steps(self, rank: int) -> list[tuple[int, ...]]:
        """The steps of one rank as packed integers: one each, or the parts of one action."""
        return list(split_steps(self.codes(rank)))

    def stage_rank(self, stage: int) -> int:
        """The rank that holds `stage`."""
        return self.stage_ranks[stage]

    def rank_stages(self, rank: int) -> list[int]:
        """The stages of one rank, in model order; chunk k of the rank is the k-th of them."""
        return [stage for stage, owner in enumerate(self.stage_ranks) if owner == rank]

    def chunk(self, stage: int) -> int:
        """The index of a stage among the chunks of its rank."""
        return self.stage_ranks[:stage].count(self.stage_ranks[stage])

    def dump(self, path: str | PathLike[str]) -> None:
        """Write a CSV file, one line per rank, in the text form of ``torch.distributed.pipelining``."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(self.ranks)

    @classmethod
    def load(cls, path: str | PathLike[str], *, name: str = "custom") -> Schedule:
        """Read a CSV file with one line per rank; empty cells (torch's idle steps) are skipped.

        Raises:
            ScheduleError: the file is missing or empty, or a cell is not an action (named by line and column).
        """
        try:
            with open(path, newline="", encoding="utf-8") as file:
                rows = [_parse_row(path, number, row) for number, row in enumerate(csv.reader(file), 1) if row]
        except ScheduleError:
            raise
        except (OSError, ValueError, csv.Error) as error:  # ValueError: also a number with thousands of digits
            raise ScheduleError(f"schedule.path={path}: cannot be read ({error}); use a CSV file of actions") from error
        if not rows:
            raise ScheduleError(f"schedule.path={path}: is empty; use one line of actions for each rank")
        return cls.from_actions(rows, name=name)


_MOST_NAMED = 8
"""The number of missing stages that a message lists."""


def _parse_row(path: str | PathLike[str], line: int, cells: Sequence[str]) -> list[Action]:
    actions = []
    for column, cell in enumerate(cells, 1):
        if cell.strip():
            try:
                actions.append(Action.parse(cell))
            except ScheduleError as error:
                raise ScheduleError(f"schedule.path={path}: line {line}, column {column}: {error}") from None
    return actions


def _parts(row: Iterable[Action]) -> Iterable[Action]:
    for action in row:
        yield from action.parts or (action,)


def _stage_ranks(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    owners: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for step, action in enumerate(row):
            for part in action.parts or (action,):
                if part.op in COMPUTE and owners.setdefault(part.stage, rank) != rank:
                    message = f"rank {rank} runs {part}, but stage {part.stage} is on rank {owners[part.stage]}"
                    raise ScheduleError(message, grid(rows, (rank, step)), action)
    stages = 1 + max(owners, default=-1)
    missing = list(islice((stage for stage in range(stages) if stage not in owners), _MOST_NAMED))
    if missing or not stages:
        what = f"no rank runs stages {missing}" if missing else "no rank runs any stage"
        raise ScheduleError(f"{what}; every stage needs an F and a B", grid(rows))
    return tuple(owners[stage] for stage in range(stages))
