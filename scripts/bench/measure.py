"""What is measured on the ranks: paired steps, and the peak of live tensors.

In a pair both sides train on the same batch, one after the other in the same processes; which one goes first
alternates. Wall time is from a barrier before the step to one after it, so it includes waiting for the slowest rank.
CPU time is of the whole process, gloo's threads included. Each measurement has ranks of its own, which a ``partial``
gets: not every peer can be set up twice in a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.live import LiveBytes
from bench.sides import Megastack, Side, peer
from bench.task import LAYOUTS
from megastack.data.loader import Loader
from megastack.testing.ranks import run_ranks

WARM_UP = 2
SIDES = ("megastack", "peer")


@dataclass(frozen=True)
class RankRecord:
    """One rank's figures, by side: a value for each pair, and the loss of every step (None where it has none)."""

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    losses: dict[str, list[float | None]]
    bytes_by_axis: dict[str, int]


def measure_pairs(name: str, pairs: int) -> list[RankRecord]:
    """Train both sides in step on forked ranks; the records by rank."""
    return run_ranks(partial(_pairs_on_rank, name, pairs), LAYOUTS[name].world_size, timeout=3600)


def measure_peaks(name: str) -> dict[str, list[int]]:
    """Peak live tensor bytes of the second step, by side, one value for each rank; each side alone in its processes."""
    ranks = LAYOUTS[name].world_size
    return {side: run_ranks(partial(_peak_on_rank, name, side), ranks, timeout=600) for side in SIDES}


def _pairs_on_rank(name: str, pairs: int) -> RankRecord:
    layout = LAYOUTS[name]
    ours = Megastack(layout)
    sides: dict[str, Side] = {"megastack": ours, "peer": peer(layout, ours.loader.step)}
    record = RankRecord({s: [] for s in SIDES}, {s: [] for s in SIDES}, {s: [] for s in SIDES}, {})
    for number in range(WARM_UP + pairs):
        for side in SIDES if number % 2 else reversed(SIDES):
            ours.ledger.reset()
            wall, cpu, loss = _timed(sides[side].step, number)
            if side == "megastack":
                record.bytes_by_axis.update(_by_axis(ours))
            record.losses[side].append(None if loss is None else float(loss))
            if number >= WARM_UP:
                record.wall_s[side].append(wall)
                record.cpu_s[side].append(cpu)
    return record


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
    """The peak of one side's second step, with everything it made since it was built."""
    layout = LAYOUTS[name]
    loader = _loader(name) if side == "peer" else None
    with LiveBytes() as tensors:
        step = Megastack(layout).step if loader is None else peer(layout, loader.step).step
        step(0)
        tensors.restart()
        step(1)
    _barrier()
    return tensors.peak


def _loader(name: str) -> Loader:
    """The loader alone: whatever else it takes to make one is gone when this returns."""
    return Megastack(LAYOUTS[name]).loader


def limit_threads() -> None:
    """One thread, before anything is computed: the ranks are forked from this process."""
    torch.set_num_threads(1)
