"""What a rank does: find its place on the mesh, build the run, train, and say how it ended.

The same code serves ranks that megastack's launcher started, ranks of torchrun and ranks of srun. A rank that fails
writes its own account before it raises, since whoever notices a failure first is seldom who failed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megastack.build import Training, build_loop, build_training
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import MegastackError
from megastack.mesh.mesh import Mesh
from megastack.observe.failure import FailureRecord
from megastack.observe.folder import RunFolder
from megastack.observe.logging import set_up_logging
from megastack.training.hooks import Hooks
from megastack.training.loop import Loop
from megastack.training.signals import StopRequest
from megastack.training.state import RunResult


@dataclass(frozen=True)
class Assignment:
    """What the launcher decided once for all ranks.

    Attributes:
        config: a legal configuration.
        folder: the run folder, which exists.
        resume: the checkpoint to continue from.
        pid: the process to signal when the run is to stop.
    """

    config: TrainConfig
    folder: Path
    resume: Path | None = None
    pid: int | None = None


def work(
    assignment: Assignment,
    dataset: Dataset | None = None,
    hooks: Hooks | None = None,
    *,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
) -> RunResult:
    """Train on this rank; to be called on every rank of the world, with rank variables in the environment.

    Args:
        assignment: alike on all ranks.
        dataset: the data, where it was read already.
        hooks: what to call on the way.
        signals: those that ask this rank, and so the run, to stop.
    """
    config, folder = assignment.config, RunFolder(assignment.folder)
    torch.set_num_threads(threads_per_rank(config))
    shape = mesh_shape(config, int(os.environ.get("WORLD_SIZE", "1")))
    rank, loop = int(os.environ.get("RANK", "0")), None
    with StopRequest(config.run.time_limit_s, signals) as stop:
        try:
            mesh = Mesh.from_environment(shape, device=config.device.value, timeout_s=config.launch.timeout_s)
            log = set_up_logging(folder.log(rank), rank, mesh.coordinates)
            log.info("started with pid %d on %s, %d threads", os.getpid(), mesh.device, torch.get_num_threads())
            loop = build_loop(_ready(assignment, mesh, dataset), folder, stop, hooks, assignment.resume, assignment.pid)
            result = loop.run()
            log.info("%s after step %d", result.status, result.step)
        except BaseException as error:
            step, action = _whereabouts(loop)
            echo, refused = is_echo(error), loop is None and isinstance(error, MegastackError)
            record = FailureRecord.of(
                error, rank, shape.coordinates(rank), step=step, action=action, echo=echo, refused=refused
            )
            record.write(folder.failure(rank))
            raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _ready(assignment: Assignment, mesh: Mesh, dataset: Dataset | None) -> Training:
    """A training in the state that it starts from."""
    training = build_training(assignment.config, mesh, dataset)
    if assignment.resume is not None:
        training.restore(assignment.resume)
    elif assignment.config.checkpoint.load_weights is not None:
        training.load_weights(Path(assignment.config.checkpoint.load_weights))
    return training


def _whereabouts(loop: Loop | None) -> tuple[int, str]:
    """Completed steps, and what a rank is doing."""
    if loop is None:
        return 0, "starting"
    action = loop.step.pipeline.current
    return loop.progress.step, loop.doing + ("" if action is None else f", action {action}")


def is_echo(error: BaseException) -> bool:
    """Whether an error says no more than that another rank cannot be reached (any longer)."""
    return any(
        isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "gloo/" in str(cause))
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def threads_per_rank(config: TrainConfig, local_ranks: int | None = None) -> int:
    """CPU threads of each rank: as configured, else this machine's divided among its ranks."""
    if config.launch.threads_per_rank is not None:
        return config.launch.threads_per_rank
    local = local_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // local)
