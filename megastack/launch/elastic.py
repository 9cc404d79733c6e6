"""Elastic jobs: the record of their starts, and standby ranks, which a start does not need for training.

``starts.jsonl`` in the run folder has one line per start. Its length is the number of restarts; torchrun counts only
the failures that one agent saw, not the starts of the job.

A standby rank waits until the others end, and ends with the same outcome. It cannot return early: an agent whose
workers have all exited waits for the other agents, joins no further restart, and closes the rendezvous for all of them
when it exits. Standby ranks therefore poll the store for the outcome that rank 0 publishes.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError
from megastack.mesh.shape import MeshShape
from megastack.observe.failure import read_failures, silent_ranks
from megastack.observe.files import LineFile, read_records
from megastack.observe.folder import RunFolder
from megastack.observe.metrics import MetricsWriter, row
from megastack.observe.ownership import TakenOver
from megastack.observe.status import read_status, update_status
from megastack.records import RecordError, integer, string
from megastack.training.signals import StopRequest, describe_stop
from megastack.training.state import RunResult

LONGEST_REASON = 160
"""Maximum length of the previous failure's reason in the line of a restart."""
MOST_RANGES = 8
"""Maximum number of rank ranges in a line."""
OUTCOME, LEFT = "megastack/outcome", "megastack/left"
POLL_S = 0.2


@dataclass(frozen=True)
class Start:
    """One start of a job.

    Attributes:
        restart: the number of restarts so far; 0 for the first start.
        nodes: the number of machines, if the launcher reports it.
        started: the number of ranks that the launcher started.
        ranks: the number of ranks that train.
        dp: the data-parallel degree.
        accumulation: microbatches per step on each data-parallel rank.
        step: completed steps of the checkpoint that it resumes from.
        after: how the previous start ended.
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
        """Describe the start, e.g. ``restart 1: 1 node, 2 ranks, dp 2 → 1, gradient accumulation 2 → 4; …``."""
        nodes = [] if self.nodes is None else [_counted(self.nodes, "node")]
        parts = [*nodes, _counted(self.started, "rank")]
        parts += [_change("dp", None if former is None else former.dp, self.dp)]
        parts += [_change("gradient accumulation", None if former is None else former.accumulation, self.accumulation)]
        text = f"{f'restart {self.restart}' if self.restart else 'elastic start'}: {', '.join(parts)}"
        if self.started > self.ranks:
            text += f"; {_counted(self.started - self.ranks, 'standby rank')} from rank {self.ranks} on"
        if self.restart:
            text += f"; continues after step {self.step}"
        return f"{text} (before: {self.after})" if self.after else text


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _change(name: str, before: int | None, now: int) -> str:
    return f"{name} {now}" if before in (None, now) else f"{name} {before} → {now}"


def read_starts(folder: RunFolder) -> list[Start]:
    """Read the starts so far; lines that a crash truncated are skipped."""
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


def describe_last_end(folder: RunFolder) -> str | None:
    """Describe how the previous start ended, as far as it is recorded; None if there was none."""
    status, starts = read_status(folder.status), read_starts(folder)
    if status is None:
        return None
    if status["status"] == "running":
        return "ended without a report"
    if status["status"] == "failed" and starts:
        reports = read_failures(replace(folder, restart=len(starts) - 1).failures)
        if silent := silent_ranks(reports, starts[-1].ranks):
            return f"failed, {_ranks(silent)} ended without a report"
    where = "" if status["coordinates"] is None else f" [rank {status['rank']} | {status['coordinates']}]"
    reason = (status["reason"] or "").splitlines()
    return f"{status['status']}{where}{f' {reason[0][:LONGEST_REASON]}' if reason else ''}"


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks in words, with consecutive ranks as a range: ``rank 3``, ``ranks 2, 8–15``."""
    ranges = list[list[int]]()
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    parts = [str(first) if first == last else f"{first}–{last}" for first, last in ranges]
    more = ["…"] if len(parts) > MOST_RANGES else []
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join([*parts[:MOST_RANGES], *more])}"


def record_start(
    config: TrainConfig,
    shape: MeshShape,
    folder: Path,
    *,
    nodes: int | None,
    started: int,
    step: int,
    after: str | None,
) -> tuple[Start, str]:
    """Record a start in the run folder; called on one rank, before any other rank writes there.

    Args:
        config: the configuration, with the parallel degrees of this start.
        shape: the mesh.
        folder: the run folder.
        nodes: the number of machines, if the launcher reports it.
        started: the number of ranks that the launcher started.
        step: completed steps of the checkpoint that it resumes from.
        after: how the previous start ended.

    Returns:
        The start, and the line that describes it.
    """
    run = RunFolder(folder)
    former = read_starts(run)
    accumulation = config.batch.global_size // (config.batch.micro_size * shape.dp)
    start = Start(len(former), nodes, started, shape.world_size, shape.dp, accumulation, step, after)
    last = former[-1] if former else None
    _append(run, start)
    text = start.describe(last)
    if last is not None:
        _write_event(run, start, last)
    update_status(run.status, "running", step=step, start=text)
    return start, text


def _append(folder: RunFolder, start: Start) -> None:
    file = LineFile(folder.starts)
    file.append(json.dumps({"time": time.time()} | asdict(start)))
    file.close()


def _write_event(folder: RunFolder, start: Start, last: Start) -> None:
    """Write a restart to the metrics, as an event."""
    fields: dict[str, Any] = {"dp_before": last.dp, "accumulation_before": last.accumulation}
    metrics = MetricsWriter(folder.metrics, tensorboard=False)
    metrics.write(row("event", start.step, {"name": "restart"} | asdict(start) | fields))
    metrics.close()


class LaterStartGuard:
    """A hook on rank 0 that ends this start when a later one has taken over the run folder.

    Agents that lose contact for a while consider each other dead, and the remaining ones restart the job while the
    others still train.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._size = folder.starts.stat().st_size

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Check after a step.

        Raises:
            TakenOver: there is a later start.
        """
        changed = self._folder.starts.stat().st_size != self._size
        if changed and len(read_starts(self._folder)) > self._folder.restart + 1:
            raise TakenOver(f"a later start of this job has the run folder; this one ends after step {row['step']}")


def stand_by(
    store: dist.Store, rank: int, folder: Path, grace_s: float, signals: Sequence[signal.Signals] = ()
) -> RunResult:
    """Wait as a standby rank until the run ends, and return its result.

    Args:
        store: shared with the ranks that train.
        rank: this rank.
        folder: the run folder, for the result.
        grace_s: how long the run may take to end after a signal before this rank exits.
        signals: the signals that ask this rank to end.

    Raises:
        ConfigError: the configuration was rejected.
    """
    signalled_at = None
    with StopRequest(None, signals) as stop:
        while True:
            try:
                if store.check([OUTCOME]):
                    break
            except dist.DistError:
                return RunResult("failed", 0, None, folder, "rank 0 can no longer be reached")
            if stop.code:
                signalled_at = signalled_at or time.monotonic()
                if time.monotonic() > signalled_at + grace_s:
                    return RunResult("preempted", 0, None, folder, describe_stop(stop.code))
            time.sleep(POLL_S)
    return _read_outcome(store, rank, folder)


def _read_outcome(store: dist.Store, rank: int, folder: Path) -> RunResult:
    outcome = json.loads(store.get(OUTCOME))
    store.set(f"{LEFT}/{rank}", "")
    if outcome["status"] == "refused":
        raise ConfigError(outcome["reason"])
    return RunResult(outcome["status"], outcome["step"], outcome["loss"], folder, outcome["reason"])


def release_standby(
    store: dist.Store, standby: Iterable[int], outcome: RunResult | BaseException, grace_s: float
) -> None:
    """Publish the outcome from rank 0, and wait until standby ranks have read it: the store may end with rank 0."""
    waiting, deadline = list(standby), time.monotonic() + grace_s
    if not waiting:
        return
    store.set(OUTCOME, json.dumps(_as_record(outcome)))
    while waiting and time.monotonic() < deadline:
        waiting = [rank for rank in waiting if not store.check([f"{LEFT}/{rank}"])]
        if waiting:
            time.sleep(POLL_S / 4)


def _as_record(outcome: RunResult | BaseException) -> dict[str, object]:
    if isinstance(outcome, RunResult):
        return {"status": outcome.status, "step": outcome.step, "loss": outcome.loss, "reason": outcome.reason}
    status = "refused" if isinstance(outcome, ConfigError) else "failed"
    return {"status": status, "step": 0, "loss": None, "reason": str(outcome)}
