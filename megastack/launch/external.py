"""Runs whose ranks were started by torchrun or srun: rank 0 checks and prepares the run, all ranks train.

In an elastic job, ranks that the parallel degrees do not need are on standby until the others finish.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megastack.checkpoint.manifest import read_trainer
from megastack.comm.observer import RankObserver
from megastack.comm.peer_failure import is_peer_failure
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, ErrorLine, MegastackError, MeshError, RankEnvironmentError
from megastack.launch.elastic import LaterStartGuard, describe_last_end, record_start, release_standby, stand_by
from megastack.launch.environment import adopt_slurm, environment_warnings, nodes
from megastack.launch.failure import ObservedExits, end_failed_run, failure_of, find_failure, is_user_error
from megastack.launch.processes import SIGNALS, die_with_parent
from megastack.launch.rendezvous import (
    REJECTION_S,
    NotStarted,
    any_invalid,
    choose_reporter,
    join_store,
    reject,
    rejection_without_others,
    reporter_of_others,
)
from megastack.launch.supervision import prepare_environment
from megastack.launch.worker import Task, TaskFailed, run_task, work
from megastack.mesh.device import pick_device
from megastack.mesh.environment import RankEnvironment, agent_serves_store, has_agent, read_environment
from megastack.mesh.mesh import open_process_group
from megastack.mesh.shape import MeshShape, describe_coordinates
from megastack.observe.console import Console
from megastack.observe.failure import read_failures
from megastack.observe.folder import RunFolder
from megastack.observe.ownership import Heartbeat
from megastack.observe.watchdog import read_reports
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.folder import Assignment, claim_run
from megastack.preflight.inspect import inspect
from megastack.preflight.model import check_mesh
from megastack.training.signals import StopRequest
from megastack.training.state import Hooks, RunResult

NAMED = 8
"""Maximum number of missing ranks in a message."""
LEAST_PATIENCE_S, MOST_PATIENCE_S = 2.0, 10.0
"""How long a rank with a peer failure waits for the reports of the others."""


def join(
    config: TrainConfig,
    overrides: Sequence[str] = (),
    *,
    known: Sequence[ErrorLine] = (),
    opening: str = "",
    hooks: Hooks | None = None,
) -> RunResult:
    """Take part in a run as the rank that the environment names; called on every rank.

    Args:
        config: the configuration, as far as it could be read; for an elastic job, with the degrees of this start.
        overrides: the command line that it came from, for the run folder.
        known: the errors found so far; the report contains them and all others.
        opening: the text to print before the run starts.
        hooks: the user's hooks.

    Raises:
        ConfigError: raised on every rank, if any rank finds its configuration invalid, if rank 0 cannot use the data,
            resume path or run folder, or if the checkpoint does not fit.
    """
    if has_agent():
        die_with_parent()
    adopt_slurm()
    launched = read_environment()
    assert launched is not None, "join() is called on ranks of a launcher"
    rank, started = launched.rank, launched.world_size
    try:
        store = join_store(launched, REJECTION_S if known else config.launch.timeout_s)
    except (NotStarted, RankEnvironmentError) as error:
        return _end_without_others(config, launched, known, error)
    if any_invalid(store, rank, started, known or _device_errors(config, rank)):
        reject(store, rank, started, partial(_all_errors, config, started))
    world = _World(store, rank, mesh_shape(config, started), started)
    grace_s = config.launch.grace_s
    if rank >= world.shape.world_size:
        return stand_by(world.store, rank, _elastic_folder(config), grace_s, SIGNALS)
    standby = range(world.shape.world_size, started) if rank == 0 else ()
    try:
        result = _train(world, config, overrides, opening, hooks)
    except BaseException as error:
        with contextlib.suppress(dist.DistError):
            release_standby(world.store, standby, error, grace_s)
        raise
    release_standby(world.store, standby, result, grace_s)
    return result


@dataclass(frozen=True)
class _World:
    """This rank, the mesh of the ranks that train, and the store shared by all started ranks."""

    store: dist.Store
    rank: int
    shape: MeshShape
    started: int

    def open_group(self, config: TrainConfig) -> None:
        """Open the process group of the ranks that train."""
        device = pick_device(config.device.value)
        prepare_environment(config)
        open_process_group(self.store, self.rank, self.shape.world_size, device, config.launch.timeout_s)


def _device_errors(config: TrainConfig, rank: int) -> Sequence[ErrorLine]:
    """Return why this rank has no device, which only its own machine can determine."""
    try:
        pick_device(config.device.value)
    except MeshError as error:
        return [f"[rank {rank}] {error}"]
    return ()


def _all_errors(config: TrainConfig, started: int, known: Sequence[ErrorLine]) -> Sequence[ErrorLine]:
    """Return the known errors and all others."""
    try:
        errors = ErrorCollector(known)
        inspect(config, errors, check_mesh(config, errors, started))
    except ConfigError as error:
        return error.errors
    return known


def _train(
    world: _World, config: TrainConfig, overrides: Sequence[str], opening: str, hooks: Hooks | None
) -> RunResult:
    """Run a rank that trains."""
    world.open_group(config)
    decided: list[Assignment | Sequence[ErrorLine] | None] = [None]
    with contextlib.ExitStack() as owned:
        if world.rank == 0:
            decided = [mine := _decide(world, config, overrides, opening)]
            if isinstance(mine, Assignment) and mine.ownership is not None:
                owned.enter_context(Heartbeat(mine.ownership))
        dist.broadcast_object_list(decided, src=0)
        if not isinstance(decided[0], Assignment):
            dist.destroy_process_group()
            raise ConfigError.of(decided[0] or ())
        return _work(decided[0], world, hooks)


def _work(assignment: Assignment, world: _World, hooks: Hooks | None) -> RunResult:
    rank, folder = world.rank, RunFolder(assignment.folder, assignment.restart)
    if assignment.config.launch.elastic and rank == 0:
        given = hooks or Hooks()
        hooks = replace(given, on_step=[LaterStartGuard(folder), *given.on_step])
    with StopRequest(signals=SIGNALS):  # if the launcher ends the others, this rank can still finish its report
        try:
            conclude = partial(_end, world, assignment, folder)
            return work(assignment, hooks=hooks, signals=SIGNALS, conclude=conclude)
        except Exception as error:
            if not assignment.may_write:
                Console(stderr=True, enabled=rank == 0).line(str(error), style="red")
                return RunResult("failed", 0, None, folder.path, str(error))
            if not folder.failure(rank).exists():
                raise  # the report could not be written
            return _end(world, assignment, folder)


def _decide(
    world: _World, config: TrainConfig, overrides: Sequence[str], opening: str
) -> Assignment | Sequence[ErrorLine]:
    after = describe_last_end(RunFolder(_elastic_folder(config)))
    try:
        prepared = claim_run(config, overrides, inspect(config, ErrorCollector(), world.shape))
    except ConfigError as error:
        return error.errors
    assignment, notes = prepared.assignment, prepared.notes
    if config.launch.elastic:
        try:
            assignment = _with_start(assignment, world.started, after)
        except (MegastackError, OSError) as error:
            prepared.taken.undo()
            return [str(error)]
        notes = (*notes, *_warnings(config), str(assignment.start))
    console = Console()
    notes = (*environment_warnings(config), *notes)
    for line in (opening, *notes, f"run folder {assignment.folder}"):
        if line:
            console.line(line)
    return assignment


def _elastic_folder(config: TrainConfig) -> Path:
    """Return the folder of an elastic job."""
    return Path(config.run.dir or config.run.root)


def _with_start(assignment: Assignment, started: int, after: str | None) -> Assignment:
    """Record this start of an elastic job, and return the assignment with the line that describes it."""
    config, shape = assignment.config, assignment.shape
    step = 0 if assignment.resume is None else int(read_trainer(assignment.resume)["step"])
    start, text = record_start(config, shape, assignment.folder, nodes=nodes(), started=started, step=step, after=after)
    return replace(assignment, restart=start.restart, start=text)


def _warnings(config: TrainConfig) -> list[str]:
    found = []
    if config.checkpoint.every is None:
        found.append("checkpoint.every=null: a failing rank sets the run back to step 0")
    if agent_serves_store():
        rule = "nodes cannot join, and the first one cannot be lost"
        found.append(f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is not set for torchrun: {rule}")
    return found


def _end_without_others(
    config: TrainConfig,
    launched: RankEnvironment,
    known: Sequence[ErrorLine],
    error: NotStarted | RankEnvironmentError,
) -> RunResult:
    """End a run whose rendezvous failed; the first rank that joined reports which ranks did not.

    Raises:
        ConfigError: the configuration is invalid.
        RankEnvironmentError: the address of rank 0 cannot be used, which no rank can report for the others.
    """
    rank, started = launched.rank, launched.world_size
    if known:
        errors = _all_errors(config, started, known) if rank == 0 else known
        raise rejection_without_others(launched, errors, error) from None
    if isinstance(error, RankEnvironmentError):
        raise error
    shape, missing = mesh_shape(config, started), error.ranks
    if rank == next(other for other in range(started) if other not in missing):
        _, verb, why = str(error).partition(" did not join")
        trains = [other for other in missing if other < shape.world_size]
        places = {other: describe_coordinates(shape.coordinates(other)) for other in trains}
        who = [f"[rank {other} | {places.get(other, 'standby')}]" for other in missing[:NAMED]]
        more = [f"{len(missing) - NAMED} more{verb}"] if len(missing) > NAMED else []
        Console(stderr=True).line("\n".join([*more, *(each + verb + why for each in who)]), style="red")
    return RunResult("failed", 0, None, _elastic_folder(config), str(error))


def _end(world: _World, assignment: Assignment, folder: RunFolder) -> RunResult:
    """End the run on a rank that failed: record the first failure, and print it on one rank as the last output.

    A rank with a primary failure prints its own report. If there are only peer failures, the first rank that has waited
    for the reports of the others combines them.

    Raises:
        ConfigError: the ranks rejected the configuration.
    """
    rank, shape, timeout_s = world.rank, assignment.shape, assignment.config.launch.timeout_s
    own = next(record for record in read_failures(folder.failures) if record.rank == rank)
    failure, shows = failure_of(own), False
    if not own.refused:
        if own.echo:
            _await_reports(folder, shape.world_size, timeout_s)
        records = read_failures(folder.failures)
        failure = find_failure(records, read_reports(folder.watch), ObservedExits(rank), shape, timeout_s)
        shows = own.echo and records[0].echo and _is_first_to_print(folder)
    if not (own.refused or own.echo):
        failure = replace(failure, rejected=False)
        Console(stderr=True).line(own.describe(), style="red")
    try:
        result = end_failed_run(folder, failure, shows=shows)
    except ConfigError as rejection:
        rejection.reported_by(failure.rank)
        if own.refused:
            choose_reporter(world.store, rank, shape.world_size, rejection)
        raise
    return replace(result, step=own.step)


def _await_reports(folder: RunFolder, ranks: int, timeout_s: float) -> None:
    """Wait until all ranks have written their reports, or until no further report can be expected."""
    deadline = time.monotonic() + min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, timeout_s / 10))
    while len(list(folder.failures.glob("rank_*.json"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_first_to_print(folder: RunFolder) -> bool:
    """Whether no other rank prints the failure."""
    try:
        folder.report_marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # a full disk; a duplicate is better than nothing
    return True


def join_task(task: Task) -> Any:
    """Run a task as a rank of torchrun or srun, and return the result of this rank; called on every rank.

    If any rank has found its arguments invalid, all ranks reject them.

    Raises:
        ConfigError: a rank rejected the configuration.
        TaskFailed: another rank ended.
    """
    adopt_slurm()
    launched = read_environment()
    assert launched is not None, "join_task() is called on ranks of a launcher"
    rank, ranks = launched.rank, launched.world_size
    store = join_store(launched, task.config.launch.timeout_s)
    if any_invalid(store, rank, ranks, ()):
        reject(store, rank, ranks, lambda found: found)
    try:
        _World(store, rank, task.shape, ranks).open_group(task.config)
        return run_task(task, RankObserver())
    except Exception as error:
        if isinstance(error, MegastackError) and is_user_error(error):
            choose_reporter(store, rank, ranks, error)
        if not is_peer_failure(error):
            raise
        if (reporter := reporter_of_others(store)) is not None:
            raise ConfigError(f"rank {reporter} found an error").reported_by(reporter) from None
        message = str(error).partition("\n")[0]
        raise TaskFailed(f"[rank {rank}] another rank ended or did not answer: {message}") from None
