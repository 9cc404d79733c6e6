"""A run whose ranks were started by torchrun or srun: the first rank decides, all of them work.

Of an elastic job, ranks that the degrees do not need wait until the others are done.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megastack.checkpoint.manifest import read_trainer
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.launch.environment import adopt_slurm, has_agent, nodes, shares_store
from megastack.launch.meeting import meet
from megastack.launch.preflight import prepare
from megastack.launch.restarts import Guard, how_it_ended, is_taken_over, note_start
from megastack.launch.spare import dismiss, wait_out
from megastack.launch.start import die_with_parent
from megastack.launch.worker import Assignment, work
from megastack.mesh.mesh import backend_of, pick_device
from megastack.observe.console import Console
from megastack.observe.failure import read_failures
from megastack.observe.folder import RunFolder
from megastack.observe.status import update_status
from megastack.training.hooks import Hooks
from megastack.training.state import RunResult

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def join(
    config: TrainConfig, overrides: Sequence[str] = (), *, opening: str = "", hooks: Hooks | None = None
) -> RunResult:
    """Take part in a run as the rank that the environment names; to be called on every rank.

    Args:
        config: a legal configuration, of an elastic job with the degrees of this start.
        overrides: the command line it came from, for the run folder.
        opening: what to print before the run starts.
        hooks: what ranks call on the way.

    Raises:
        ConfigError: on every rank, when the first one finds data, resume path or run folder unusable, or when all find
            that the checkpoint does not fit.
    """
    if has_agent():
        die_with_parent()
    adopt_slurm()
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    grace_s = config.launch.grace_s
    world = _World(meet(rank, started, config.launch.timeout_s), rank, mesh_shape(config, started).world_size)
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
    backend = backend_of(pick_device(config.device.value))
    dist.init_process_group(backend, store=world.store, rank=rank, world_size=world.ranks, timeout=limit)
    found: list[Assignment | str | None] = [None]
    if rank == 0:
        found = [_decide(config, overrides, opening)]
    dist.broadcast_object_list(found, src=0)
    if not isinstance(found[0], Assignment):
        dist.destroy_process_group()
        raise ConfigError(str(found[0]))
    folder = RunFolder(found[0].folder, found[0].restart)
    if config.launch.elastic and rank == 0:
        given = hooks or Hooks()
        hooks = replace(given, on_step=[Guard(folder), *given.on_step])
    try:
        return work(found[0], hooks=hooks, signals=SIGNALS)
    except Exception:
        return _failed(folder, rank, told=not (config.launch.elastic and is_taken_over(folder)))


def _decide(config: TrainConfig, overrides: Sequence[str], opening: str) -> Assignment | str:
    after = how_it_ended(RunFolder(_place(config)))
    try:
        prepared = prepare(config, overrides)
    except MegastackError as error:
        return str(error)
    assignment, notes = prepared.assignment, prepared.notes
    if config.launch.elastic:
        assignment = _elastic(assignment, after)
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
    started = int(os.environ["WORLD_SIZE"])
    start, text = note_start(
        assignment.config, assignment.folder, nodes=nodes(), started=started, step=step, after=after
    )
    return replace(assignment, restart=start.restart, start=text)


def _warnings(config: TrainConfig) -> list[str]:
    found = []
    if config.checkpoint.every is None:
        found.append("checkpoint.every=null: a rank that fails takes the run back to step 0")
    if shares_store():
        found.append(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is not set for torchrun: no node can join, nor the first one be lost"
        )
    return found


def _failed(folder: RunFolder, rank: int, *, told: bool) -> RunResult:
    """Show this rank's failure, in a line where it is another's; ``told``: keep the first of all in ``status.json``."""
    records = read_failures(folder.failures)
    first, own = records[0], next(record for record in records if record.rank == rank)
    reason = first.message if first.refused else first.error
    if told:
        update_status(
            folder.status,
            "failed",
            step=first.step,
            reason=reason,
            rank=first.rank,
            coordinates=first.coordinates,
            exit_code=78 if first.refused else 1,
        )
    if own.refused:
        raise ConfigError(own.message)
    text = own.summary().splitlines()[0] if own.echo else own.describe()
    Console(stderr=True).line(text, style="red")
    return RunResult("failed", own.step, None, folder.path, reason)
