"""Measurements on the ranks: paired steps, and the peak of live tensors.

Each side runs in its own processes, with its own memory and threads. In a pair both sides train on the same batch, one
after the other while the other's processes wait; which one goes first alternates. After a few pairs, both sides start
again in new processes. Wall time is measured from a barrier before the step to one after it, so it includes waiting for
the slowest rank. CPU time covers the whole process, including gloo's threads.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.live import LiveBytes
from bench.sides import Megastack, loader_of, peer
from bench.task import LAYOUTS
from megastack.testing.ranks import run_ranks

WARM_UP = 2
PAIRS_A_ROUND = 6
"""Pairs from the same processes, since the memory that a process happens to get affects the speed of all its steps."""
SIDES = ("megastack", "peer")


@dataclass(frozen=True)
class RankRecord:
    """The figures of one rank, by side: a value per pair, and the loss of every step, None if the rank has none."""

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    losses: dict[str, list[float | None]]
    bytes_by_axis: dict[str, int]


@dataclass(frozen=True)
class _SideRecord:
    wall_s: list[float]
    cpu_s: list[float]
    losses: list[float | None]
    bytes_by_axis: dict[str, int]


def measure_pairs(name: str, pairs: int) -> list[RankRecord]:
    """Train both sides in turn on forked ranks, new ones after every few pairs; the records by rank."""
    full, rest = divmod(pairs, PAIRS_A_ROUND)
    rounds = [_measure_round(name, count) for count in (*[PAIRS_A_ROUND] * full, rest) if count]
    return [_joined(of_rank) for of_rank in zip(*rounds, strict=True)]


def _joined(rounds: Sequence[RankRecord]) -> RankRecord:
    """The concatenated records of a rank; the bytes are the same in every step."""

    def every(part: str) -> dict[str, list[Any]]:
        return {side: [value for record in rounds for value in getattr(record, part)[side]] for side in SIDES}

    return RankRecord(every("wall_s"), every("cpu_s"), every("losses"), rounds[0].bytes_by_axis)


def _measure_round(name: str, pairs: int) -> list[RankRecord]:
    ranks = LAYOUTS[name].world_size
    turns = multiprocessing.get_context("fork").Barrier(len(SIDES) * ranks)
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_side_on_rank, name, pairs, turns, Path(folder))
        found = run_ranks(work, len(SIDES) * ranks, timeout=3600)
    both = zip(found[:ranks], found[ranks:], strict=True)
    return [_both_sides({"megastack": ours, "peer": theirs}) for ours, theirs in both]


def _both_sides(sides: dict[str, _SideRecord]) -> RankRecord:
    return RankRecord(
        {side: record.wall_s for side, record in sides.items()},
        {side: record.cpu_s for side, record in sides.items()},
        {side: record.losses for side, record in sides.items()},
        sides["megastack"].bytes_by_axis,
    )


def measure_peaks(name: str) -> dict[str, list[int]]:
    """Peak bytes of live tensors in the second step, by side, for each rank; the sides run one after the other."""
    ranks = LAYOUTS[name].world_size
    return {side: run_ranks(partial(_peak_on_rank, name, side), ranks, timeout=600) for side in SIDES}


def _side_on_rank(name: str, pairs: int, turns: Any, folder: Path) -> _SideRecord:
    """Train one side, whose ranks have their own process group, whenever it is its turn."""
    which, rank = divmod(dist.get_rank(), LAYOUTS[name].world_size)
    side = SIDES[which]
    _open_world(folder / side, rank, LAYOUTS[name].world_size)
    ours = Megastack(LAYOUTS[name]) if side == "megastack" else None
    step = peer(LAYOUTS[name], loader_of(LAYOUTS[name]).step).step if ours is None else ours.step
    record = _SideRecord([], [], [], {})
    for number in range(WARM_UP + pairs):
        for turn in SIDES if number % 2 else reversed(SIDES):
            turns.wait()
            if turn == side:
                _train_once(step, number, ours, record)
    turns.wait()
    return record


def _open_world(store: Path, rank: int, ranks: int) -> None:
    """Replace the process group of both sides by one of this side's ranks; a single rank has none."""
    dist.destroy_process_group()
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)


def _train_once(step: Callable[[int], Any], number: int, ours: Megastack | None, record: _SideRecord) -> None:
    if ours is not None:
        ours.ledger.reset()
    wall, cpu, loss = _timed(step, number)
    if ours is not None:
        record.bytes_by_axis.update(_by_axis(ours))
    record.losses.append(None if loss is None else float(loss))
    if number >= WARM_UP:
        record.wall_s.append(wall)
        record.cpu_s.append(cpu)


def _timed(step: Callable[[int], Any], number: int) -> tuple[float, float, Any]:
    _barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step(number)
    cpu = time.process_time() - cpu
    _barrier()
    return time.perf_counter() - wall, cpu, loss


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _by_axis(ours: Megastack) -> dict[str, int]:
    axes = {axis for axis, _ in ours.ledger.records()}
    return {axis: ours.ledger.total(axis=axis).wire_bytes for axis in sorted(axes)}


def _peak_on_rank(name: str, side: str) -> int:
    """The peak of one side's second step, counting everything since its construction."""
    layout = LAYOUTS[name]
    loader = loader_of(layout) if side == "peer" else None
    with LiveBytes() as tensors:
        step = Megastack(layout).step if loader is None else peer(layout, loader.step).step
        step(0)
        tensors.restart()
        step(1)
    _barrier()
    return tensors.peak


def limit_threads() -> None:
    """Limit this process to one thread before it computes anything, since ranks are forked from it."""
    torch.set_num_threads(1)
