"""A run whose ranks were started by torchrun or srun: the first rank decides, all of them work."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, MegastackError
from megastack.launch.environment import adopt_slurm
from megastack.launch.preflight import prepare
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

    Raises:
        ConfigError: on every rank, when the first one finds data, resume path or run folder unusable, or when all find
            that the checkpoint does not fit.
    """
    adopt_slurm()
    backend = backend_of(pick_device(config.device.value))
    dist.init_process_group(backend, timeout=timedelta(seconds=config.launch.timeout_s))
    found: list[Assignment | str | None] = [None]
    if dist.get_rank() == 0:
        found = [_decide(config, overrides, opening)]
    dist.broadcast_object_list(found, src=0)
    if not isinstance(found[0], Assignment):
        dist.destroy_process_group()
        raise ConfigError(str(found[0]))
    try:
        return work(found[0], hooks=hooks, signals=SIGNALS)
    except Exception:
        return _failed(RunFolder(found[0].folder), dist.get_rank())


def _decide(config: TrainConfig, overrides: Sequence[str], opening: str) -> Assignment | str:
    try:
        prepared = prepare(config, overrides)
    except MegastackError as error:
        return str(error)
    console = Console()
    for line in (opening, *prepared.notes, f"run folder {prepared.assignment.folder}"):
        if line:
            console.line(line)
    return prepared.assignment


def _failed(folder: RunFolder, rank: int) -> RunResult:
    """Show this rank's failure, in a line where it is another's, and keep the first of all in ``status.json``."""
    records = read_failures(folder.failures)
    first, own = records[0], next(record for record in records if record.rank == rank)
    reason = first.message if first.refused else first.error
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
