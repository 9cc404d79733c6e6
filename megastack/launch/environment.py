"""Launch information from the environment of a process: its launcher, its world and its CPUs.

:mod:`megastack.mesh.environment` reads and validates the rank variables. This module does not import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, MegastackError, RankEnvironmentError
from megastack.mesh.environment import in_slurm_step, read_environment
from megastack.mesh.hostlist import first_host

WAIT_POLICY = "OMP_WAIT_POLICY"
NCCL_DEFAULTS = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_PROPAGATE_ERROR": "1",
    "TORCH_GLOO_LAZY_INIT": "1",
}
"""Environment variables of a rank with a GPU, unless the user has set them.

NCCL's own flight recorder is kept and written after a time-out, and a rank with an error ends the waits of the others.
Gloo, which only carries small Python values there, connects two ranks when they first communicate. Otherwise it would
connect all pairs of ranks of every group, and 1,000 ranks exceed the usual limit of open files.
"""
NCCL_DUMP = "TORCH_FR_DUMP_TEMP_FILE"
"""Prefix of the files of NCCL's flight recorder; ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` is its older name."""
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def is_worker(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher started this process as a rank.

    Raises:
        RankEnvironmentError: the rank variables are invalid.
    """
    return read_environment(environment) is not None


def require_no_launcher(command: str, environment: Mapping[str, str] | None = None) -> None:
    """Check that no launcher started this process, for a command that starts its own ranks.

    Raises:
        ConfigError: a launcher started this process.
        RankEnvironmentError: the rank variables are invalid.
    """
    if (found := read_environment(environment)) is not None:
        found.require_endpoint()
        raise ConfigError(f"{command}: it starts its own ranks; run it without torchrun or srun")


def adopt_slurm(environment: MutableMapping[str, str] | None = None) -> None:
    """Set torch's rank variables from Slurm's; variables that are already set are kept.

    Raises:
        RankEnvironmentError: the rank variables are invalid.
    """
    env = os.environ if environment is None else environment
    found = None if "RANK" in env else read_environment(env)
    if found is not None:
        env["WORLD_SIZE"] = str(found.world_size)
        for name, value in found.as_variables().items():
            env.setdefault(name, value)


def first_node(nodes: str) -> str:
    """Return the first host of a Slurm node list, e.g. ``gpu003`` of ``gpu[003-005,9],cpu1``.

    Raises:
        MeshError: the list is malformed.
    """
    return first_host(nodes)


def is_first_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process prints for its world: rank 0, or any process that is not a rank of a known world."""
    try:
        found = read_environment(environment)
    except RankEnvironmentError:
        return True
    return found is None or found.rank == 0


def report_of(error: MegastackError, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the text that this process prints about an error before training; None if another rank prints it.

    Every rank reports errors in its own rank variables. If the ranks have agreed on a reporter, it prints the error and
    names itself unless it is rank 0. Otherwise, rank 0 prints.
    """
    if isinstance(error, RankEnvironmentError):
        return str(error)
    if error.reporter is None:
        return str(error) if is_first_rank(environment) else None
    found = read_environment(environment)
    rank = 0 if found is None else found.rank
    if rank != error.reporter:
        return None
    return f"[rank {rank}] {error}" if rank else str(error)


def world_size(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the number of ranks that the launcher started; None without a launcher.

    Raises:
        RankEnvironmentError: the rank variables are invalid.
    """
    found = read_environment(environment)
    return None if found is None else found.world_size


def nodes(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the number of machines that the launcher uses; None if the launcher does not set it."""
    env = os.environ if environment is None else environment
    found = env.get("GROUP_WORLD_SIZE", env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "")))
    return int(found) if found.isdecimal() else None


def cpus_of_task(environment: Mapping[str, str] | None = None) -> int | None:
    """Return the number of CPUs that Slurm allocated to this rank; None if Slurm does not set it."""
    env = os.environ if environment is None else environment
    found = env.get("SLURM_CPUS_PER_TASK", "")
    return int(found) if in_slurm_step(env) and found.isdecimal() and int(found) else None


def let_threads_sleep(environment: MutableMapping[str, str] | None = None) -> None:
    """Make OpenMP threads sleep while they wait for each other, unless the user has set a policy.

    OpenMP reads its variables when it is loaded, so this has no effect if torch has already been imported.
    """
    if "torch" not in sys.modules:
        (os.environ if environment is None else environment).setdefault(WAIT_POLICY, "passive")


def lets_threads_sleep(environment: Mapping[str, str] | None = None) -> bool:
    """Whether OpenMP threads sleep while they wait for each other; otherwise they spin and occupy their CPU."""
    env = os.environ if environment is None else environment
    return env.get(WAIT_POLICY, "").strip().lower() == "passive"


def set_nccl_defaults(dump: Path | None = None, environment: MutableMapping[str, str] | None = None) -> None:
    """Set :data:`NCCL_DEFAULTS`, before any process group is created.

    Args:
        dump: the prefix of the files of NCCL's flight recorder, which the rank is appended to.
        environment: default: that of this process.
    """
    env = os.environ if environment is None else environment
    for name, value in NCCL_DEFAULTS.items():
        env.setdefault(name, value)
    if dump is not None and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in env:
        env.setdefault(NCCL_DUMP, str(dump))


def environment_warnings(config: TrainConfig, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return warnings about environment variables that may block a run of this configuration."""
    env = os.environ if environment is None else environment
    needs_more = config.parallel.pp > 1 or config.parallel.zero.stage >= 2
    if config.device == "cpu" or env.get(MAX_CONNECTIONS, "").strip() != "1" or not needs_more:
        return []
    cause = "parallel.pp > 1" if config.parallel.pp > 1 else f"parallel.zero.stage={config.parallel.zero.stage}"
    return [
        f"{MAX_CONNECTIONS}=1: all kernels of a GPU share one queue, and with {cause} a message that waits for another "
        "rank blocks the kernels behind it; unset it"
    ]
