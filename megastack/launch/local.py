"""Start all ranks of a run on this machine, and turn their exits into one result.

Ranks return how the run ended. If a rank fails, the launcher sorts the failure reports of the ranks and prints the
first failure as its last output.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megastack.comm.observer import RankObserver
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, ErrorLine, Violation, counted
from megastack.launch.environment import environment_warnings
from megastack.launch.failure import ObservedExits, end_failed_run, find_failure
from megastack.launch.processes import (
    SIGNALS,
    START_METHOD,
    RanksFailed,
    StopForwarder,
    StoppedEarly,
    forks_lose_cuda,
    start_ranks,
)
from megastack.launch.worker import Task, TaskFailed, WaitForAll, run_reported_task, run_task, work
from megastack.mesh.device import count_gpus
from megastack.mesh.shape import MeshShape
from megastack.observe.console import Console
from megastack.observe.failure import FailureRecord, any_failed, by_cause, read_failures
from megastack.observe.folder import RunFolder
from megastack.observe.ownership import Heartbeat
from megastack.observe.status import read_status, update_status
from megastack.observe.streams import best_effort_output
from megastack.observe.watchdog import read_reports
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.folder import Assignment, Prepared, claim_run
from megastack.preflight.inspect import inspect
from megastack.training.state import Hooks, RunResult

RANKS_PER_CPU = 64
"""Maximum number of ranks started per CPU; a larger number is treated as a mistake."""
DEGREES = ("parallel.pp", "parallel.dp", "parallel.cp", "parallel.tp")


def launch(
    config: TrainConfig,
    overrides: Sequence[str] = (),
    *,
    known: Sequence[ErrorLine] = (),
    place: Callable[[], str] | None = None,
    opening: str = "",
    hooks: Hooks | None = None,
) -> RunResult:
    """Train on local ranks; their number is the product of the parallel degrees.

    Args:
        config: the configuration, as far as it could be read.
        overrides: the command line that it came from, for the run folder.
        known: the errors found so far; the report contains them and all others.
        place: returns the run folder to use instead of ``run.dir``; called once the configuration is valid.
        opening: the text to print before the run starts.
        hooks: the user's hooks.

    Raises:
        ConfigError: configuration, data, resume path, run folder or checkpoint cannot be used; nothing was trained.
    """
    errors = ErrorCollector(known)
    shape = errors.check(lambda: mesh_shape(config), *DEGREES)
    if shape is not None:
        errors.check(lambda: _require_startable(config, shape))
    found = inspect(config, errors, shape)
    if place is not None:
        config = replace(config, run=replace(config.run, dir=place()))
    with best_effort_output(), StopForwarder(config.launch.grace_s) as stop:
        prepared = claim_run(config, overrides, found)
        with Heartbeat(prepared.taken.ownership), _recorded_errors(prepared.assignment):
            console = Console()
            notes = (*environment_warnings(config), *prepared.notes)
            for line in (opening, *notes, f"run folder {prepared.assignment.folder}"):
                if line:
                    console.line(line)
            result = _run(prepared, hooks, stop)
    return replace(result, interrupted=stop.received is not None)


@contextlib.contextmanager
def _recorded_errors(assignment: Assignment) -> Iterator[None]:
    """Record an error of the launcher itself, so that the status of the run does not stay ``running``."""
    folder = RunFolder(assignment.folder)
    try:
        yield
    except BaseException as error:
        status = read_status(folder.status)
        if status is not None and status["status"] == "running" and assignment.may_write:
            with contextlib.suppress(OSError):
                update_status(folder.status, "failed", reason=f"{type(error).__name__}: {error}".rstrip(": "))
        raise


def _require_startable(config: TrainConfig, shape: MeshShape) -> None:
    """Reject a world size that is too large for this machine, or ranks that this process cannot fork."""
    errors = list[ErrorLine]()
    ranks, cpus = shape.world_size, os.cpu_count() or 1
    if ranks > RANKS_PER_CPU * cpus:
        errors.append(
            f"world={ranks}: pp·dp·cp·tp ranks are too many for the {counted(cpus, 'CPU')} of this machine; use "
            f"torchrun or srun on several, or degrees of at most {RANKS_PER_CPU * cpus} ranks"
        )
    if dist.is_initialized():
        errors.append(
            "train: ranks are forked from this process, which holds a process group; use "
            "torch.distributed.destroy_process_group() before, or torchrun"
        )
    errors += _device_errors(config, ranks)
    if errors:
        raise ConfigError.of(errors)


def _device_errors(config: TrainConfig, ranks: int) -> list[ErrorLine]:
    """Return why forked ranks could not have a GPU each, if this machine has any."""
    gpus = 0 if config.device == "cpu" else count_gpus()
    errors = list[ErrorLine]()
    if 0 < gpus < ranks:
        rule = f"{counted(ranks, 'rank')} (pp·dp·cp·tp) need a GPU each, and this machine has {counted(gpus, 'GPU')}"
        fewer = f"degrees of at most {counted(gpus, 'rank')}"
        errors.append(Violation("device", config.device, rule, ("cpu", fewer, "torchrun or srun on several machines")))
    if gpus and forks_lose_cuda():
        rule = "ranks are forked from this process, which has called the CUDA runtime, so they cannot use a GPU"
        called = "train before the first such call (torch.cuda.is_available() is one)"
        advice = ("cpu", called, "PYTORCH_NVML_BASED_CUDA_CHECK=1", "megastack train", "torchrun")
        errors.append(Violation("device", config.device, rule, advice))
    return errors


def _run(prepared: Prepared, hooks: Hooks | None, stop: StopForwarder) -> RunResult:
    assignment, dataset = prepared.assignment, prepared.dataset
    config, folder = assignment.config, RunFolder(assignment.folder)
    sent = multiprocessing.get_context(START_METHOD).SimpleQueue()
    try:
        returned = start_ranks(
            config,
            assignment.shape.world_size,
            _train,
            assignment,
            dataset,
            hooks,
            sent,
            failed=lambda: not sent.empty() or any_failed(folder.failures),
            before=stop.check,
        )
    except RanksFailed as error:
        return _end(assignment, replace(error.exits, killed=_reason_killed(stop)), _drain(sent))
    except StoppedEarly as error:
        reason = str(error)
        status = update_status(folder.status, "preempted", reason=reason)
        Console(stderr=True).line(reason, style="red")
        return RunResult("preempted", status["step"] or 0, None, folder.path, reason)
    result: RunResult = returned[0]
    return result


def _train(
    wait_for_all: WaitForAll, assignment: Assignment, dataset: Dataset, hooks: Hooks | None, sent: Any
) -> RunResult:
    """Train on a forked rank.

    A terminal sends SIGINT to the ranks as well as to the launcher. Ranks ignore it, and the launcher forwards it. A
    rank that fails has written its report, so the agent needs only its exit code.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = work(
            assignment,
            dataset,
            hooks,
            signals=SIGNALS,
            send=lambda record: sent.put(record.shortened()),
            wait_for_all=wait_for_all,
        )
    except Exception:
        sys.exit(1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return result


def _drain(sent: Any) -> list[FailureRecord]:
    found = []
    while not sent.empty():
        found.append(sent.get())
    return found


def _reason_killed(stop: StopForwarder) -> str | None:
    if not stop.killed or stop.received is None:
        return None
    return f"received {stop.received.name} and did not stop within launch.grace_s"


def _end(assignment: Assignment, exits: ObservedExits, sent: Sequence[FailureRecord]) -> RunResult:
    """End a run in which a rank failed.

    Raises:
        ConfigError: the ranks rejected the configuration.
    """
    folder, timeout_s = RunFolder(assignment.folder), assignment.config.launch.timeout_s
    records = by_cause([*read_failures(folder.failures), *sent])
    failure = find_failure(records, read_reports(folder.watch), exits, assignment.shape, timeout_s)
    step = failure.step or (read_status(folder.status) or {}).get("step") or 0
    may_write = assignment.may_write
    return end_failed_run(folder, replace(failure, step=step), may_write=may_write, pid=os.getpid())


def launch_task(task: Task) -> Any:
    """Run a task on local ranks, and return the result of rank 0. A single rank runs in this process.

    Raises:
        ConfigError: a rank rejected the configuration.
        TaskFailed: a rank failed in another way.
    """
    if task.shape.world_size == 1:
        return run_task(task, RankObserver())
    if errors := _device_errors(task.config, task.shape.world_size):
        raise ConfigError.of(errors)
    with tempfile.TemporaryDirectory(prefix="megastack-") as name, best_effort_output():
        folder, ranks = RunFolder(Path(name)), task.shape.world_size
        try:
            failed = partial(any_failed, folder.failures)
            return start_ranks(task.config, ranks, run_reported_task, task, folder, failed=failed)[0]
        except RanksFailed as error:
            records, states = read_failures(folder.failures), read_reports(folder.watch)
            failure = find_failure(records, states, error.exits, task.shape, task.config.launch.timeout_s)
            raise (ConfigError(failure.reason) if failure.rejected else TaskFailed(failure.text)) from None
