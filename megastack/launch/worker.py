"""What a rank does: find its place on the mesh, build the run, train, and say how it ended.

The same code serves ranks that megastack's launcher started, ranks of torchrun and ranks of srun. A rank that fails
writes its own account before it raises, since whoever notices a failure first is seldom who failed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastack.assemble.loop import build_loop
from megastack.assemble.training import Training, build_training
from megastack.comm.observer import RankObserver
from megastack.comm.peer_failure import is_peer_failure
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayerError,
    MegastackError,
    MeshError,
    PlacementError,
    ScheduleError,
)
from megastack.launch.threads import choose_threads
from megastack.mesh.device import keep_freed_memory
from megastack.mesh.environment import RankEnvironment, read_environment
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.observe.console import set_up_logging
from megastack.observe.failure import FailureRecord, any_failed
from megastack.observe.folder import RunFolder
from megastack.observe.ownership import Ownership, OwnershipGuard
from megastack.observe.watchdog import JOINING, Watchdog
from megastack.training.loop import Loop
from megastack.training.signals import StopRequest
from megastack.training.state import Hooks, RunResult

REFUSALS = (ConfigError, CheckpointError, DataError, PlacementError, MeshError, ScheduleError)
"""What is the user's to mend, and no failure."""


@dataclass(frozen=True)
class Assignment:
    """What the launcher decided once for all ranks.

    Attributes:
        config: a legal configuration.
        folder: the run folder, which exists.
        resume: the checkpoint to continue from.
        weights: the checkpoint to take the first weights from.
        pid: the process to signal when the run is to stop.
        restart: of an elastic job, 0 for its first start.
        start: what there is to say about this start of an elastic job.
        ownership: of the run folder, by the process that decided.
    """

    config: TrainConfig
    folder: Path
    resume: Path | None = None
    pid: int | None = None
    restart: int = 0
    start: str | None = None
    ownership: Ownership | None = None
    weights: Path | None = None

    @property
    def may_write(self) -> bool:
        """Whether the run folder is still this run's."""
        return self.ownership is None or self.ownership.held


def work(
    assignment: Assignment,
    dataset: Dataset | None = None,
    hooks: Hooks | None = None,
    *,
    signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
    tell: Callable[[FailureRecord], object] | None = None,
    first: Callable[[int], object] | None = None,
) -> RunResult:
    """Train on this rank; to be called on every rank of the world, with rank variables in the environment.

    Args:
        assignment: alike on all ranks.
        dataset: the data, where it was read already.
        hooks: what to call on the way.
        signals: those that ask this rank, and so the run, to stop.
        tell: called with this rank's account of its failure where that cannot be written.
        first: called with this rank before it looks for the others.
    """
    config, folder = assignment.config, RunFolder(assignment.folder, assignment.restart)
    threads = choose_threads(config)
    torch.set_num_threads(threads.count)
    launched = read_environment() or RankEnvironment(0, 1)
    shape, rank, loop = mesh_shape(config, launched.world_size), launched.rank, None
    with StopRequest(config.run.time_limit_s, signals) as stop:
        try:
            if first is not None:
                first(rank)
            observer = RankObserver()
            with Watchdog(
                observer.flight_recorder,
                folder.report(rank),
                rank,
                shape.coordinates(rank),
                limit_s=config.launch.timeout_s,
                doing=lambda: _whereabouts(loop),
                failed=lambda: any_failed(folder.failures),
                may_write=lambda: assignment.may_write,
            ):
                mesh = join(shape, config, observer)
                keep_freed_memory(mesh.device)
                log = set_up_logging(folder.log(rank), rank, mesh.coordinates)
                log.info("started with pid %d on %s, %s", os.getpid(), mesh.device, threads)
                if assignment.start is not None:
                    log.info(assignment.start)
                ready = _ready(assignment, mesh, dataset)
                loop = build_loop(ready, folder, stop, hooks, assignment.resume, **_origin(assignment))
                result = loop.run()
            log.info("%s after step %d", result.status, result.step)
        except BaseException as error:
            record = FailureRecord.of(
                error,
                rank,
                shape.coordinates(rank),
                step=0 if loop is None else loop.progress.step,
                action=_failing(loop, error),
                echo=is_peer_failure(error) or is_of_others(error, rank),
                refused=loop is None and is_refusal(error),
            )
            _leave(record, folder.failure(rank), tell, may_write=assignment.may_write)
            raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def join(shape: MeshShape, config: TrainConfig, observer: RankObserver) -> Mesh:
    """The mesh; who waits here for others in vain says so."""
    recorder = observer.flight_recorder
    with recorder.waits(recorder.start(*JOINING, (), tuple(range(shape.world_size)))):
        limit_s = config.launch.timeout_s
        return Mesh.from_environment(shape, device=config.device.value, timeout_s=limit_s, observer=observer)


def _ready(assignment: Assignment, mesh: Mesh, dataset: Dataset | None) -> Training:
    """A training in the state that it starts from."""
    training = build_training(assignment.config, mesh, dataset)
    if assignment.resume is not None:
        training.restore(assignment.resume)
    elif assignment.weights is not None:
        training.load_weights(assignment.weights)
    return training


def _whereabouts(loop: Loop | None) -> str:
    """What a rank is doing: the step or phase, the action, the layer."""
    if loop is None:
        return "starting"
    action, layer = loop.step.pipeline.current, loop.mesh.flight_recorder.layer
    parts = [loop.doing] if action is None else [loop.doing, f"action {action}", *([layer] if layer else [])]
    return ", ".join(parts)


def _failing(loop: Loop | None, error: BaseException) -> str:
    """The same, with the operation that a rank waited for in vain."""
    waiting = loop.mesh.flight_recorder.waiting if loop is not None and is_peer_failure(error) else None
    return _whereabouts(loop) + ("" if waiting is None else f", waiting for {waiting}")


def _leave(
    record: FailureRecord, path: Path, tell: Callable[[FailureRecord], object] | None, *, may_write: bool
) -> None:
    """Leave the account of a failure on the disk, or with the launcher where the disk is full or the folder lost."""
    try:
        if may_write:
            record.write(path)
            return
    except OSError:
        pass
    if tell is not None:
        tell(record)


def _origin(assignment: Assignment) -> dict[str, Any]:
    """What the records of a run say of where it comes from, and what keeps it from writing."""
    guard = None if assignment.ownership is None else OwnershipGuard(assignment.ownership)
    return {"pid": assignment.pid, "start": assignment.start, "guard": guard}


def is_refusal(error: BaseException) -> bool:
    """Whether an error is the user's to mend."""
    return isinstance(error, REFUSALS) and not isinstance(error, LayerError)


def is_of_others(error: BaseException, rank: int) -> bool:
    """Whether an error is the fault of other ranks, which raise it as well."""
    return isinstance(error, MegastackError) and bool(error.ranks) and rank not in error.ranks
