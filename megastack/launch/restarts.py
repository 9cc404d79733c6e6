"""The starts of an elastic job: on how many ranks each ran, and what a restart says about it.

``starts.jsonl`` in the run folder has a line for each, and its length is the number of restarts: what torchrun counts
are an agent's own failures, not the job's starts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.observe.failure import read_failures, silent_ranks
from megastack.observe.files import LineFile, read_records
from megastack.observe.folder import RunFolder
from megastack.observe.metrics import MetricsWriter, row
from megastack.observe.ownership import TakenOver
from megastack.observe.status import read_status, update_status
from megastack.records import RecordError, integer, string

MOST_TOLD = 160
"""Characters of an earlier reason that a restart repeats."""
MOST_RUNS = 8
"""Runs of neighbouring ranks that it names."""


@dataclass(frozen=True)
class Start:
    """One start of a job.

    Attributes:
        restart: 0 for the first one.
        nodes: machines, where the launcher tells.
        started: ranks that the launcher started.
        ranks: those of them that train.
        dp: the data-parallel degree.
        accumulation: microbatches of a step on each data-parallel rank.
        step: completed steps of the checkpoint that it goes on from.
        after: how the start before ended.
    """

    restart: int
    nodes: int | None
    started: int
    ranks: int
    dp: int
    accumulation: int
    step: int
    after: str | None = None

    def describe(self, former: Start | None) -> str:
        """The start for people, e.g. ``restart 1: 1 node, 2 ranks, dp 2 → 1, gradient accumulation 2 → 4; …``."""
        nodes = [] if self.nodes is None else [_counted(self.nodes, "node")]
        facts = [*nodes, _counted(self.started, "rank")]
        facts += [_change("dp", None if former is None else former.dp, self.dp)]
        facts += [_change("gradient accumulation", None if former is None else former.accumulation, self.accumulation)]
        text = f"{f'restart {self.restart}' if self.restart else 'elastic start'}: {', '.join(facts)}"
        if self.started > self.ranks:
            text += f"; {_counted(self.started - self.ranks, 'rank')} from {self.ranks} on left over, which wait"
        if self.restart:
            text += f"; goes on after step {self.step}"
        return f"{text} (before it: {self.after})" if self.after else text


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _change(name: str, before: int | None, now: int) -> str:
    return f"{name} {now}" if before in (None, now) else f"{name} {before} → {now}"


def read_starts(folder: RunFolder) -> list[Start]:
    """The starts so far; a line that a crash cut short is passed over."""
    try:
        records = read_records(folder.starts)
    except OSError:
        return []
    found = []
    for record in records:
        with contextlib.suppress(RecordError):
            found.append(_start_of(record))
    return found


def _start_of(record: Mapping[str, Any]) -> Start:
    nodes = None if record.get("nodes") is None else integer(record, "nodes")
    after = None if record.get("after") is None else string(record, "after")
    counts = ("restart", "started", "ranks", "dp", "accumulation", "step")
    return Start(nodes=nodes, after=after, **{name: integer(record, name) for name in counts})


def how_it_ended(folder: RunFolder) -> str | None:
    """How the start before ended, as far as it could say; ``None`` where there was none."""
    status, starts = read_status(folder.status), read_starts(folder)
    if status is None:
        return None
    if status["status"] == "running":
        return "ended without a word"
    if status["status"] == "failed" and starts:
        accounts = read_failures(replace(folder, restart=len(starts) - 1).failures)
        if silent := silent_ranks(accounts, starts[-1].ranks):
            return f"failed, {_ranks(silent)} ended without a word"
    where = "" if status["coordinates"] is None else f" [rank {status['rank']} | {status['coordinates']}]"
    reason = (status["reason"] or "").splitlines()
    return f"{status['status']}{where}{f' {reason[0][:MOST_TOLD]}' if reason else ''}"


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, neighbours together: ``rank 3``, ``ranks 2, 8–15``."""
    runs = list[list[int]]()
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(first) if first == last else f"{first}–{last}" for first, last in runs]
    more = ["…"] if len(parts) > MOST_RUNS else []
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join([*parts[:MOST_RUNS], *more])}"


def note_start(
    config: TrainConfig, folder: Path, *, nodes: int | None, started: int, step: int, after: str | None
) -> tuple[Start, str]:
    """Record a start in the run folder, on one rank, before any other writes there; with the line that tells about it.

    Args:
        config: with the degrees of this start.
        folder: the run folder.
        nodes: machines, where the launcher tells.
        started: ranks that the launcher started.
        step: completed steps of the checkpoint that it goes on from.
        after: how the start before ended.
    """
    run, shape = RunFolder(folder), mesh_shape(config)
    former = read_starts(run)
    accumulation = config.batch.global_size // (config.batch.micro_size * shape.dp)
    start = Start(len(former), nodes, started, shape.world_size, shape.dp, accumulation, step, after)
    last = former[-1] if former else None
    _append(run, start)
    text = start.describe(last)
    if last is not None:
        _record(run, start, last)
    update_status(run.status, "running", step=step, start=text)
    return start, text


def _append(folder: RunFolder, start: Start) -> None:
    file = LineFile(folder.starts)
    file.append(json.dumps({"time": time.time()} | asdict(start)))
    file.close()


def _record(folder: RunFolder, start: Start, last: Start) -> None:
    """A restart as an event among the metrics."""
    fields: dict[str, Any] = {"dp_before": last.dp, "accumulation_before": last.accumulation}
    metrics = MetricsWriter(folder.metrics, tensorboard=False)
    metrics.write(row("event", start.step, {"name": "restart"} | asdict(start) | fields))
    metrics.close()


def is_taken_over(folder: RunFolder) -> bool:
    """Whether there was another start after this one."""
    return len(read_starts(folder)) > folder.restart + 1


class Guard:
    """A hook on the first rank that ends a start when a later one has the folder.

    Agents that lose sight of each other for a while take each other for dead, and those that are left start the job
    anew while the others still train.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._size = folder.starts.stat().st_size

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Look, after a step.

        Raises:
            TakenOver: there is a later start.
        """
        if self._folder.starts.stat().st_size != self._size and is_taken_over(self._folder):
            raise TakenOver(f"a later start of this job has the run folder; this one ends after step {row['step']}")
