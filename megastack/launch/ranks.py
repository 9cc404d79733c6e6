"""Something short on the ranks that a configuration describes, without a run folder: generation, evaluation.

One rank works in this process, several are started as those of a training are, and under torchrun or srun this
process is one of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megastack.comm.backend import backend_of
from megastack.comm.observer import RankObserver
from megastack.comm.peer_failure import is_peer_failure
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.launch.account import Seen, account_of
from megastack.launch.environment import adopt_slurm, is_worker, world_size
from megastack.launch.meeting import meet
from megastack.launch.refusal import any_broken, choose_reporter, refuse, reporter_of_others
from megastack.launch.start import StartLine, agent, die_with_parent, run_agent
from megastack.launch.survivors import SurvivorKiller
from megastack.launch.threads import choose_threads
from megastack.launch.worker import is_of_others, is_refusal, join
from megastack.mesh.device import pick_device
from megastack.mesh.environment import read_environment
from megastack.observe.failure import FailureRecord, any_failed, read_failures
from megastack.observe.folder import RunFolder
from megastack.observe.streams import best_effort_output, protect_output
from megastack.observe.watchdog import Watchdog, read_reports

T = TypeVar("T")


class RanksFailed(MegastackError):
    """A rank failed; the text is its failure report."""


@dataclass(frozen=True)
class _Task:
    config: TrainConfig
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    folder: RunFolder
    line: StartLine

    @property
    def name(self) -> str:
        """What the ranks do, for reports."""
        return self.work.__module__.rpartition(".")[2]


def on_ranks(config: TrainConfig, work: Callable[..., T], *arguments: Any) -> T:
    """``work(config, mesh, *arguments)`` on every rank; what the first one returns, or under a launcher this one.

    Raises:
        ConfigError: a rank refused what was asked.
        RanksFailed: a rank failed in another way.
    """
    world = mesh_shape(config, world_size()).world_size
    if is_worker():
        return _joined(config, work, *arguments)
    if world == 1:
        return _here(config, RankObserver(), work, *arguments)
    with tempfile.TemporaryDirectory(prefix="megastack-") as name:
        folder = RunFolder(Path(name))
        task = _Task(config, work, arguments, folder, StartLine(world, config.launch.timeout_s))
        survivors = SurvivorKiller(world, lambda: any_failed(folder.failures), config.launch.grace_s)
        try:
            with survivors, best_effort_output():
                returned = run_agent(agent(config, world), _rank, task)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            seen = Seen(rank, survivors.exit_codes() | {rank: failure.exitcode}, outlasted=survivors.outlasted)
            raise _failure(task, seen) from None
    result: T = returned[0]
    return result


def _joined(config: TrainConfig, work: Callable[..., T], *arguments: Any) -> T:
    """The part of a rank of torchrun or srun; any rank may have found its arguments invalid, and all refuse then."""
    adopt_slurm()
    launched, limit_s = read_environment(), config.launch.timeout_s
    assert launched is not None, "is_worker() has read it"
    rank, ranks = launched.rank, launched.world_size
    store = meet(launched, limit_s)
    if any_broken(store, rank, ranks, ()):
        refuse(store, rank, ranks, lambda found: found)
    try:
        backend = backend_of(pick_device(config.device.value)).process_groups
        limit = timedelta(seconds=limit_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        return _here(config, RankObserver(), work, *arguments)
    except Exception as error:
        if isinstance(error, MegastackError) and is_refusal(error):
            choose_reporter(store, rank, ranks, error)
        if not is_peer_failure(error):
            raise
        if (reporter := reporter_of_others(store)) is not None:
            raise ConfigError(f"rank {reporter} found an error").reported_by(reporter) from None
        said = str(error).partition("\n")[0]
        raise RanksFailed(f"[rank {rank}] another rank ended or did not answer: {said}") from None


def _here(config: TrainConfig, observer: RankObserver, work: Callable[..., T], *arguments: Any) -> T:
    torch.set_num_threads(choose_threads(config).count)
    mesh = join(mesh_shape(config, world_size()), config, observer)
    try:
        return work(config, mesh, *arguments)
    finally:
        if dist.is_initialized() and is_worker():
            dist.destroy_process_group()


def _rank(task: _Task) -> Any:
    """A rank of this launcher: it ends with the launcher, and writes a failure record and a report where it fails."""
    die_with_parent()
    protect_output()
    launched = read_environment()
    assert launched is not None, "the agent sets the rank variables"
    rank, observer, config = launched.rank, RankObserver(), task.config
    place = mesh_shape(config).coordinates(rank)
    try:
        task.line.wait(rank)
        with Watchdog(
            observer.flight_recorder,
            task.folder.report(rank),
            rank,
            place,
            limit_s=config.launch.timeout_s,
            doing=lambda: task.name,
            failed=lambda: any_failed(task.folder.failures),
        ):
            return _here(config, observer, task.work, *task.arguments)
    except BaseException as error:
        echo = is_peer_failure(error) or is_of_others(error, rank)
        refused = is_refusal(error)
        record = FailureRecord.of(error, rank, place, step=0, action=task.name, echo=echo, refused=refused)
        record.write(task.folder.failure(rank))
        raise


def _failure(task: _Task, seen: Seen) -> MegastackError:
    """The first failure: a configuration error that all ranks share, or the report about one rank."""
    config, folder = task.config, task.folder
    records, reports = read_failures(folder.failures), read_reports(folder.watch)
    account = account_of(records, reports, seen, mesh_shape(config), config.launch.timeout_s)
    return ConfigError(account.reason) if account.refused else RanksFailed(account.text)
