"""A run whose ranks were started by torchrun or srun: the first rank decides, all of them work."""

from __future__ import annotations

import os
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
from megastack.training.state import RunResult


def join(config: TrainConfig, overrides: Sequence[str] = (), *, opening: str = "") -> RunResult:
    """Take part in a run as the rank that the environment names; to be called on every rank.

    Raises:
        ConfigError: on every rank, when the first one finds data, resume path or run folder unusable.
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
    return work(found[0])


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


def is_first_rank() -> bool:
    """Whether this process is the rank that speaks; true without a launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
