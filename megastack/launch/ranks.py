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

from megastack.comm.echo import is_echo
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.launch.environment import adopt_slurm, is_worker, world_size
from megastack.launch.meeting import meet
from megastack.launch.refusal import any_broken, choose_reporter, refuse, reporter_of_others
from megastack.launch.start import StartLine, agent, die_with_parent, run_agent
from megastack.launch.threads import choose_threads
from megastack.launch.worker import is_refusal
from megastack.mesh.environment import read_environment
from megastack.mesh.mesh import Mesh, backend_of, pick_device
from megastack.observe.failure import FailureRecord, read_failures
from megastack.observe.streams import best_effort_output, protect_output

T = TypeVar("T")


class RanksFailed(MegastackError):
    """A rank failed; the text is its account."""


@dataclass(frozen=True)
class _Task:
    config: TrainConfig
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    failures: Path
    line: StartLine


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
        return _here(config, work, *arguments)
    with tempfile.TemporaryDirectory(prefix="megastack-") as folder:
        line = StartLine(world, config.launch.timeout_s)
        task = _Task(config, work, arguments, Path(folder), line)
        try:
            with best_effort_output():
                returned = run_agent(agent(config, world), _rank, task)
        except ChildFailedError as error:
            raise _account(error, Path(folder)) from None
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
        backend, limit = backend_of(pick_device(config.device.value)), timedelta(seconds=limit_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        return _here(config, work, *arguments)
    except Exception as error:
        if isinstance(error, MegastackError) and is_refusal(error):
            choose_reporter(store, rank, ranks, error)
        if not is_echo(error):
            raise
        if (reporter := reporter_of_others(store)) is not None:
            raise ConfigError(f"rank {reporter} found an error").reported_by(reporter) from None
        said = str(error).partition("\n")[0]
        raise RanksFailed(f"[rank {rank}] another rank ended or did not answer: {said}") from None


def _here(config: TrainConfig, work: Callable[..., T], *arguments: Any) -> T:
    torch.set_num_threads(choose_threads(config).count)
    shape = mesh_shape(config, world_size())
    mesh = Mesh.from_environment(shape, device=config.device.value, timeout_s=config.launch.timeout_s)
    try:
        return work(config, mesh, *arguments)
    finally:
        if dist.is_initialized() and is_worker():
            dist.destroy_process_group()


def _rank(task: _Task) -> Any:
    """A rank of this launcher: it ends with it, and leaves its account where it fails."""
    die_with_parent()
    protect_output()
    launched = read_environment()
    assert launched is not None, "the agent sets the rank variables"
    rank = launched.rank
    try:
        task.line.wait(rank)
        return _here(task.config, task.work, *task.arguments)
    except BaseException as error:
        place, refused = mesh_shape(task.config).coordinates(rank), is_refusal(error)
        record = FailureRecord.of(error, rank, place, step=0, action="", echo=is_echo(error), refused=refused)
        record.write(task.failures / f"rank_{rank:05d}.json")
        raise


def _account(error: ChildFailedError, folder: Path) -> MegastackError:
    """The first failure: a refusal that all ranks share, or one rank's own account."""
    records = read_failures(folder)
    if not records:
        rank, failure = error.get_first_failure()
        return RanksFailed(f"rank {rank} ended with exit code {failure.exitcode} and without a traceback")
    return ConfigError(records[0].message) if records[0].refused else RanksFailed(records[0].describe())
