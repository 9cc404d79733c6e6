"""A run whose ranks were started by torchrun or srun: the first rank decides, all of them work.

Of an elastic job, ranks that the degrees do not need wait until the others are done.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megastack.checkpoint.manifest import read_trainer
from megastack.comm.backend import backend_of
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, ErrorLine, MegastackError, MeshError, RankEnvironmentError
from megastack.launch.account import Seen, account_of
from megastack.launch.environment import adopt_slurm, has_agent, nodes, world_size
from megastack.launch.meeting import meet
from megastack.launch.preflight import inspect, prepare
from megastack.launch.refusal import REFUSING_S, any_broken, choose_reporter, refusal_without_others, refuse
from megastack.launch.restarts import Guard, how_it_ended, note_start
from megastack.launch.spare import dismiss, wait_out
from megastack.launch.start import NotStarted, die_with_parent
from megastack.launch.worker import Assignment, work
from megastack.mesh.device import pick_device
from megastack.mesh.environment import agent_serves_store, read_environment
from megastack.mesh.shape import describe_coordinates
from megastack.observe.console import Console
from megastack.observe.failure import read_failures
from megastack.observe.folder import RunFolder
from megastack.observe.ownership import Heartbeat
from megastack.observe.status import update_status
from megastack.observe.watchdog import read_reports
from megastack.training.signals import StopRequest
from megastack.training.state import Hooks, RunResult

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
NAMED = 8
"""Ranks that did not come are named, up to so many."""
LEAST_PATIENCE_S, MOST_PATIENCE_S = 2.0, 10.0
"""For how long a rank that misses others waits for the accounts of the rest."""


def join(
    config: TrainConfig,
    overrides: Sequence[str] = (),
    *,
    broken: Sequence[ErrorLine] = (),
    opening: str = "",
    hooks: Hooks | None = None,
) -> RunResult:
    """Take part in a run as the rank that the environment names; to be called on every rank.

    Args:
        config: a configuration as far as it could be read, of an elastic job with the degrees of this start.
        overrides: the command line it came from, for the run folder.
        broken: what is known to be wrong with it; the report has what else there is.
        opening: what to print before the run starts.
        hooks: what ranks call on the way.

    Raises:
        ConfigError: on every rank, when any finds its configuration broken, when the first one finds data, resume path
            or run folder unusable, or when all find that the checkpoint does not fit.
    """
    if has_agent():
        die_with_parent()
    adopt_slurm()
    launched = read_environment()
    assert launched is not None, "join() is called on ranks of a launcher"
    rank, started = launched.rank, launched.world_size
    try:
        store = meet(launched, REFUSING_S if broken else config.launch.timeout_s)
    except (NotStarted, RankEnvironmentError) as error:
        if broken:
            errors = _all_errors(config, broken) if rank == 0 else broken
            raise refusal_without_others(launched, errors, error) from None
        if isinstance(error, NotStarted):
            return _alone(config, rank, started, error)
        raise  # no rank can report for the others
    broken = broken or _device_errors(config, rank)
    if any_broken(store, rank, started, broken):
        refuse(store, rank, started, partial(_all_errors, config))
    grace_s = config.launch.grace_s
    world = _World(store, rank, mesh_shape(config, started).world_size)
    if rank >= world.ranks:
        return wait_out(world.store, rank, _place(config), grace_s, SIGNALS)
    spare = range(world.ranks, started) if rank == 0 else ()
    try:
        result = _train(world, config, overrides, opening, hooks)
    except BaseException as error:
        with contextlib.suppress(dist.DistError):
            dismiss(world.store, spare, error, grace_s)
        raise
    dismiss(world.store, spare, result, grace_s)
    return result


def _device_errors(config: TrainConfig, rank: int) -> Sequence[ErrorLine]:
    """Why this rank has no device, which its machine alone can tell."""
    try:
        pick_device(config.device.value)
    except MeshError as error:
        return [f"[rank {rank}] {error}"]
    return ()


def _all_errors(config: TrainConfig, broken: Sequence[ErrorLine]) -> Sequence[ErrorLine]:
    """What is known to be wrong, and what else there is."""
    try:
        inspect(config, broken)
    except ConfigError as error:
        return error.errors
    return broken


@dataclass(frozen=True)
class _World:
    """A rank's place among those that train, and the store that all have who were started."""

    store: dist.Store
    rank: int
    ranks: int


def _train(
    world: _World, config: TrainConfig, overrides: Sequence[str], opening: str, hooks: Hooks | None
) -> RunResult:
    """The part of a rank that trains."""
    rank, limit = world.rank, timedelta(seconds=config.launch.timeout_s)
    backend = backend_of(pick_device(config.device.value)).process_groups
    dist.init_process_group(backend, store=world.store, rank=rank, world_size=world.ranks, timeout=limit)
    found: list[Assignment | Sequence[ErrorLine] | None] = [None]
    with contextlib.ExitStack() as owned:
        if rank == 0:
            found = [decided := _decide(config, overrides, opening)]
            if isinstance(decided, Assignment) and decided.ownership is not None:
                owned.enter_context(Heartbeat(decided.ownership))
        dist.broadcast_object_list(found, src=0)
        if not isinstance(found[0], Assignment):
            dist.destroy_process_group()
            raise ConfigError.of(found[0] or ())
        return _work(found[0], world, hooks)


def _work(assignment: Assignment, world: _World, hooks: Hooks | None) -> RunResult:
    rank, config, folder = world.rank, assignment.config, RunFolder(assignment.folder, assignment.restart)
    if config.launch.elastic and rank == 0:
        given = hooks or Hooks()
        hooks = replace(given, on_step=[Guard(folder), *given.on_step])
    with StopRequest(signals=SIGNALS):  # a launcher that ends the others lets this rank finish what it has to say
        try:
            return work(assignment, hooks=hooks, signals=SIGNALS)
        except Exception as error:
            if not assignment.may_write:
                Console(stderr=True, enabled=rank == 0).line(str(error), style="red")
                return RunResult("failed", 0, None, folder.path, str(error))
            if not folder.failure(rank).exists():
                raise  # not even that could be written
            return _failed(world, folder, config)


def _decide(config: TrainConfig, overrides: Sequence[str], opening: str) -> Assignment | Sequence[ErrorLine]:
    after = how_it_ended(RunFolder(_place(config)))
    try:
        prepared = prepare(config, overrides)
    except ConfigError as error:
        return error.errors
    assignment, notes = prepared.assignment, prepared.notes
    if config.launch.elastic:
        try:
            assignment = _elastic(assignment, after)
        except (MegastackError, OSError) as error:
            prepared.taken.undo()
            return [str(error)]
        notes = (*notes, *_warnings(config), str(assignment.start))
    console = Console()
    for line in (opening, *notes, f"run folder {assignment.folder}"):
        if line:
            console.line(line)
    return assignment


def _place(config: TrainConfig) -> Path:
    """The folder of an elastic job."""
    return Path(config.run.dir or config.run.root)


def _elastic(assignment: Assignment, after: str | None) -> Assignment:
    """The assignment with what there is to say about this start, which is recorded."""
    step = 0 if assignment.resume is None else int(read_trainer(assignment.resume)["step"])
    started = world_size()
    assert started is not None
    start, text = note_start(
        assignment.config, assignment.folder, nodes=nodes(), started=started, step=step, after=after
    )
    return replace(assignment, restart=start.restart, start=text)


def _warnings(config: TrainConfig) -> list[str]:
    found = []
    if config.checkpoint.every is None:
        found.append("checkpoint.every=null: a rank that fails takes the run back to step 0")
    if agent_serves_store():
        found.append(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is not set for torchrun: no node can join, nor the first one be lost"
        )
    return found


def _alone(config: TrainConfig, rank: int, started: int, error: NotStarted) -> RunResult:
    """A run that never began; the first rank that is there says who is not."""
    shape, missing = mesh_shape(config, started), error.ranks
    if rank == next(other for other in range(started) if other not in missing):
        _, verb, why = str(error).partition(" did not join")
        trains = [other for other in missing if other < shape.world_size]
        places = {other: describe_coordinates(shape.coordinates(other)) for other in trains}
        who = [f"[rank {other} | {places.get(other, 'spare')}]" for other in missing[:NAMED]]
        more = [f"{len(missing) - NAMED} more{verb}"] if len(missing) > NAMED else []
        Console(stderr=True).line("\n".join([*more, *(each + verb + why for each in who)]), style="red")
    return RunResult("failed", 0, None, _place(config), str(error))


def _failed(world: _World, folder: RunFolder, config: TrainConfig) -> RunResult:
    """Keep the failure that began it in ``status.json`` and show it, last of all and on one rank.

    A rank that failed by itself shows its own. Where ranks only miss others, the first of them that has waited for the
    accounts of the rest puts these together, and the others are silent.
    """
    rank, shape = world.rank, mesh_shape(config, dist.get_world_size())
    own = next(record for record in read_failures(folder.failures) if record.rank == rank)
    if own.refused:
        _keep(folder, own.step, own.message, own.rank, own.coordinates, 78)
        refusal = ConfigError(own.message)
        choose_reporter(world.store, rank, shape.world_size, refusal)
        raise refusal
    if own.echo:
        _await_accounts(folder, shape.world_size, config.launch.timeout_s)
    records = read_failures(folder.failures)
    if own.echo and records[0].refused:  # another rank's error, which that rank reports
        _keep(folder, records[0].step, records[0].message, records[0].rank, records[0].coordinates, 78)
        raise ConfigError(records[0].message).reported_by(records[0].rank)
    account = account_of(records, read_reports(folder.watch), Seen(rank, {}), shape, config.launch.timeout_s)
    _keep(folder, account.step, account.reason, account.rank, account.coordinates, 1)
    if not own.echo:
        Console(stderr=True).line(own.describe(), style="red")
    elif records[0].echo and _first_to_tell(folder):
        where = f"failed after step {account.step}; everything is in {folder.path}"
        Console(stderr=True).line(f"{where}\n{account.text}", style="red")
    return RunResult("failed", own.step, None, folder.path, account.reason)


def _keep(folder: RunFolder, step: int, reason: str, rank: int, coordinates: str, exit_code: int) -> None:
    with contextlib.suppress(OSError):  # a full disk may be the very reason
        fields = {"step": step, "reason": reason, "rank": rank, "coordinates": coordinates, "exit_code": exit_code}
        update_status(folder.status, "failed", **fields)


def _await_accounts(folder: RunFolder, ranks: int, timeout_s: float) -> None:
    """Wait until all ranks have left their account, or for as long as one can still be expected."""
    deadline = time.monotonic() + min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, timeout_s / 10))
    while len(list(folder.failures.glob("rank_*.json"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.05)


def _first_to_tell(folder: RunFolder) -> bool:
    """Whether no other rank has begun to tell."""
    try:
        folder.report_marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # a full disk; twice is better than never
    return True
