"""The work of one rank: join the mesh, build the run, train and report how it ended; or run one short task.

The same code runs on ranks started by megastack's launcher, torchrun and srun. A rank that fails writes a report before
it raises: the process that first notices a failure is seldom the one that caused it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastack.assemble.loop import build_loop
from megastack.assemble.training import Training, build_training
from megastack.comm.backend import backend_of
from megastack.comm.collectives import connect
from megastack.comm.observer import RankObserver
from megastack.comm.peer_failure import is_peer_failure
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import MegastackError, counted
from megastack.launch.environment import choose_threads, is_worker
from megastack.launch.failure import explains_itself, is_about_other_ranks, rejects_configuration
from megastack.launch.supervision import Supervision, join_mesh, prepare_environment, release_device
from megastack.mesh.device import keep_freed_memory
from megastack.mesh.environment import RankEnvironment, read_environment
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.observe.console import set_up_logging
from megastack.observe.devices import describe_environment, device_memory, is_out_of_memory
from megastack.observe.failure import FailureRecord
from megastack.observe.folder import RunFolder
from megastack.observe.ownership import OwnershipGuard
from megastack.observe.profiler import write_memory_snapshot
from megastack.plan.layout import smaller_settings
from megastack.preflight.folder import Assignment
from megastack.training.loop import Loop
from megastack.training.signals import StopRequest
from megastack.training.state import Hooks, RunResult

WaitForAll = Callable[[int], object]
"""Called with this rank before it connects to the others."""


class TaskFailed(MegastackError):
    """A rank of a task failed; the message is its failure report."""


@dataclass(frozen=True)
class Task:
    """A short task that every rank runs without a run folder, such as generation or evaluation.

    Attributes:
        name: a description, for reports.
        config: a valid configuration.
        shape: the mesh.
        function: called with the configuration, the mesh and the arguments.
        arguments: identical on all ranks.
    """

    name: str
    config: TrainConfig
    shape: MeshShape
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


def work(
    assignment: Assignment,
    dataset: Dataset | None = None,
    hooks: Hooks | None = None,
    *,
    signals: Sequence[signal.Signals],
    send: Callable[[FailureRecord], object] | None = None,
    wait_for_all: WaitForAll | None = None,
    conclude: Callable[[], object] = lambda: None,
) -> RunResult:
    """Train on this rank; called on every rank of the world, with the rank variables in the environment.

    Args:
        assignment: identical on all ranks.
        dataset: the data, if already read.
        hooks: the user's hooks.
        signals: the signals that ask this rank, and thereby the run, to stop.
        send: called with this rank's failure report if it cannot be written.
        wait_for_all: called with this rank before it connects to the others.
        conclude: called on another thread if this rank is blocked by a failure of another rank, after its report was
            written; its process then exits.
    """
    config, shape, folder = assignment.config, assignment.shape, RunFolder(assignment.folder, assignment.restart)
    threads = choose_threads(config)
    torch.set_num_threads(threads.count)
    rank = (read_environment() or RankEnvironment(0, 1)).rank
    mesh, loop = None, None

    def deliver(record: FailureRecord) -> None:
        _deliver_report(record, folder, send, may_write=assignment.may_write)

    supervision = Supervision(
        RankObserver(),
        folder,
        rank,
        assignment,
        doing=lambda: _describe_progress(loop),
        step=lambda: 0 if loop is None else loop.progress.step,
        deliver=deliver,
        may_write=lambda: assignment.may_write,
        conclude=conclude,
    )
    with StopRequest(config.run.time_limit_s, signals) as stop:
        try:
            if wait_for_all is not None:
                wait_for_all(rank)
            with supervision:
                mesh = supervision.join()
                keep_freed_memory(mesh.device)
                log = set_up_logging(folder.log(rank), rank, mesh.coordinates)
                log.info("started with pid %d on %s, %s", os.getpid(), mesh.device, threads)
                transport = [f"communication: {mesh.transport}"] if mesh.world.size > 1 else []
                for line in [*describe_environment(mesh.device), *transport, *filter(None, [assignment.start])]:
                    log.info(line)
                training = _build(assignment, mesh, dataset)
                _log_kernels(log, training)
                connect_ranks(log, training)
                loop = build_loop(training, folder, stop, hooks, assignment.resume, **_origin(assignment))
                result = loop.run()
            log.info("%s after step %d; %s", result.status, result.step, device_memory(mesh.device))
        except BaseException as error:
            step, action = (0 if loop is None else loop.progress.step), _describe_failure(loop, error)
            record = _report_of(error, rank, shape, step=step, action=action, before_training=loop is None)
            if is_out_of_memory(error):
                advice = _advise_on_memory(config, shape, folder.memory_snapshot(rank))
                record = replace(record, error=f"{record.error}\n{advice}")
            deliver(record)
            release_device(mesh, config)
            raise
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def run_task(task: Task, observer: RankObserver) -> Any:
    """Join the mesh, call the function of a task and return its result on this rank."""
    torch.set_num_threads(choose_threads(task.config).count)
    prepare_environment(task.config)
    return _call(task, join_mesh(task.shape, task.config, observer))


def _call(task: Task, mesh: Mesh) -> Any:
    try:
        return task.function(task.config, mesh, *task.arguments)
    except BaseException:
        release_device(mesh, task.config)
        raise
    finally:
        if dist.is_initialized() and is_worker():
            dist.destroy_process_group()


def run_reported_task(wait_for_all: WaitForAll, task: Task, folder: RunFolder) -> Any:
    """Like :func:`run_task`, on a forked rank, which writes its state and its failure report into a folder."""
    launched = read_environment()
    assert launched is not None, "the agent sets the rank variables"
    rank = launched.rank

    def deliver(record: FailureRecord) -> None:
        record.write(folder.failure(rank))

    supervision = Supervision(RankObserver(), folder, rank, task, doing=lambda: task.name, deliver=deliver)
    try:
        wait_for_all(rank)
        with supervision:
            torch.set_num_threads(choose_threads(task.config).count)
            return _call(task, supervision.join())
    except BaseException as error:
        deliver(_report_of(error, rank, task.shape, step=0, action=task.name, before_training=True))
        raise


def _build(assignment: Assignment, mesh: Mesh, dataset: Dataset | None) -> Training:
    """Build the training state from which the run starts."""
    training = build_training(assignment.config, mesh, dataset)
    if assignment.resume is not None:
        training.restore(assignment.resume)
    elif assignment.weights is not None:
        training.load_weights(assignment.weights)
    return training


def connect_ranks(log: logging.Logger, training: Training) -> None:
    """Create the communicators of NCCL before the first step.

    Otherwise each is created at its first use, which takes about a second and 100 MB. The first step would contain this
    time, and a run with too little memory would fail late. Gloo connects all ranks of a group when it is created.
    """
    mesh, step, began = training.mesh, training.step, time.perf_counter()
    if backend_of(mesh.device).wait_blocks_host:
        return
    messages, norm = mesh[Axis.PP], mesh[Axis.PP, Axis.TP]
    groups = mesh.groups(without=[messages, *([norm] if step.buckets.differ_over_data else [])])
    connect(groups, mesh.device)
    peers = step.pipeline.connect()
    passed = time.perf_counter() - began
    log.info(
        "connected %s and %s in %.1f s", counted(len(groups), "group"), counted(peers, "pipeline neighbour"), passed
    )


def _log_kernels(log: logging.Logger, training: Training) -> None:
    """Log the attention kernel; on a GPU that could run faster ones, the first rank warns on the console."""
    choice, mesh, compute = training.attention_kernel, training.mesh, training.config.precision.compute
    on_gpu = mesh.device.type == "cuda"
    warns = choice.because is not None and on_gpu and mesh.rank == 0
    log.log(logging.WARNING if warns else logging.INFO, "built-in attention: %s", choice)
    if on_gpu and mesh.rank == 0 and compute in ("fp32", "fp64"):
        log.warning("precision.compute=%s does not use the tensor cores of a GPU; try precision=bf16", compute.value)


def _origin(assignment: Assignment) -> dict[str, Any]:
    """Return what the records of a run contain about its start, and the guard of its run folder."""
    guard = None if assignment.ownership is None else OwnershipGuard(assignment.ownership)
    return {"pid": assignment.pid, "start": assignment.start, "guard": guard}


def _describe_progress(loop: Loop | None) -> str:
    """Describe what this rank is doing: the step or phase, the action, the layer."""
    if loop is None:
        return "starting"
    action, layer = loop.step.pipeline.current, loop.mesh.flight_recorder.layer
    parts = [loop.doing] if action is None else [loop.doing, f"action {action}", *([layer] if layer else [])]
    return ", ".join(parts)


def _describe_failure(loop: Loop | None, error: BaseException) -> str:
    """Describe what this rank was doing, with the operation that it was blocked on if a peer failed."""
    waiting = loop.mesh.flight_recorder.waiting if loop is not None and is_peer_failure(error) else None
    return _describe_progress(loop) + ("" if waiting is None else f", waiting for {waiting}")


def _advise_on_memory(config: TrainConfig, shape: MeshShape, snapshot: Path) -> str:
    """Return lines that say what a run out of memory could change, after writing a snapshot of the GPU's memory."""
    lines = [f"to use less memory: {change}" for change in smaller_settings(config, shape.world_size)]
    if write_memory_snapshot(snapshot):
        lines.append(f"the GPU's memory is described in {snapshot}; open it at https://pytorch.org/memory_viz")
    return "\n".join(lines)


def _report_of(
    error: BaseException, rank: int, shape: MeshShape, *, step: int, action: str, before_training: bool
) -> FailureRecord:
    return FailureRecord.of(
        error,
        rank,
        shape.coordinates(rank),
        step=step,
        action=action,
        echo=is_peer_failure(error) or is_about_other_ranks(error, rank),
        refused=rejects_configuration(error, before_training=before_training),
        explained=explains_itself(error),
    )


def _deliver_report(
    record: FailureRecord, folder: RunFolder, send: Callable[[FailureRecord], object] | None, *, may_write: bool
) -> None:
    """Write a failure report; send it to the launcher if the disk is full or the run no longer owns the folder."""
    try:
        if may_write:
            record.write(folder.failure(record.rank))
            return
    except OSError:
        pass
    if send is not None:
        send(record)
