"""Launch information from the environment of a process: its launcher, its world, its CPUs and threads.

:mod:`megastack.mesh.environment` reads and validates the rank variables. This module does not import torch.

The threads of a matrix product all wait for the slowest one, so several threads can be slower than one, for two
reasons. In a small model, a product takes less time than waking a thread. On a machine that also runs other programs,
one of the threads often waits for a CPU; if OpenMP makes the others spin, they occupy the CPU it waits for, and a step
takes ten times as long. The command line therefore makes waiting threads sleep (:func:`let_threads_sleep`), and a small
model uses one thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, MegastackError, RankEnvironmentError, counted
from megastack.mesh.environment import in_slurm_step, local_world_size, read_environment
from megastack.mesh.hostlist import first_host

WAIT_POLICY = "OMP_WAIT_POLICY"
WORK_PER_THREAD = 2**23
"""Multiplications and additions that justify one more thread, about a quarter of a millisecond."""
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
        environment: the environment; by default of this process.
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


@dataclass(frozen=True)
class Cpus:
    """The CPUs that this process may use.

    Attributes:
        allowed: the CPUs that it may be scheduled on.
        quota: how many of them its control groups let it use at a time; None if unlimited.
        load: processes on the machine that were running or waiting for a CPU in the last minute.
        installed: all CPUs of the machine.
    """

    allowed: int
    quota: float | None = None
    load: float = 0.0
    installed: int = 0

    @classmethod
    def here(cls) -> Cpus:
        """Return the CPUs of this process, from the operating system."""
        installed = os.cpu_count() or 1
        allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else installed
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return cls(allowed, cpu_quota(), load, installed)

    @property
    def usable(self) -> int:
        """Number of threads that can run at a time."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, int(self.quota)))


@dataclass(frozen=True)
class Threads:
    """A number of threads and the reason for it, in words."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} thread{'' if self.count == 1 else 's'} ({self.reason})"


def choose_threads(
    config: TrainConfig, environment: Mapping[str, str] | None = None, cpus: Cpus | None = None
) -> Threads:
    """Choose the number of threads of this rank: as configured, else from ``OMP_NUM_THREADS``, else by the workload.

    Args:
        config: a valid configuration.
        environment: contains ``LOCAL_WORLD_SIZE`` if other ranks share the machine.
        cpus: the CPUs of this process.
    """
    env = os.environ if environment is None else environment
    if config.launch.threads_per_rank is not None:
        return Threads(config.launch.threads_per_rank, "launch.threads_per_rank")
    setting = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # further numbers are for nested regions
    if setting.isdigit() and int(setting):
        return Threads(int(setting), "OMP_NUM_THREADS")
    return _by_work(config, env, Cpus.here() if cpus is None else cpus)


def _by_work(config: TrainConfig, env: Mapping[str, str], cpus: Cpus) -> Threads:
    ranks = local_world_size(env) or 1
    own = cpus_of_task(env)
    share = max(1, cpus.usable // ranks) if own is None else min(cpus.usable, own)
    limits = [Threads(share, _share(cpus, ranks, own))]
    fits = max(1, work(config) // WORK_PER_THREAD)
    size, tokens = config.model.hidden, _tokens(config)
    limits.append(Threads(fits, f"hidden {size} and {counted(tokens, 'token')} a microbatch are too small for more"))
    if not lets_threads_sleep(env):
        idle = max(1, int(cpus.installed - cpus.load) // ranks)
        limits.append(Threads(idle, f"OpenMP's threads spin while they wait, and the load is {cpus.load:.1f}"))
    return min(limits, key=lambda limit: limit.count)


def work(config: TrainConfig) -> int:
    """Multiplications and additions of the smaller kind of matrix product in a block, on this rank."""
    return 2 * _tokens(config) * config.model.hidden**2 // config.parallel.tp


def _tokens(config: TrainConfig) -> int:
    return config.batch.micro_size * config.batch.sequence_length // config.parallel.cp


def _share(cpus: Cpus, ranks: int, own: int | None) -> str:
    if own is not None:
        return "SLURM_CPUS_PER_TASK"
    quota = f", by quota {cpus.quota:g}" if cpus.quota is not None and cpus.quota < cpus.allowed else ""
    return f"{cpus.allowed} CPU{'' if cpus.allowed == 1 else 's'}{quota}, {ranks} rank{'' if ranks == 1 else 's'} here"


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of CPUs that the control groups of this process allow: the minimum over all levels.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    found = [_quota(folder) for folder in _control_groups(root)]
    return min((quota for quota in found if quota is not None), default=None)


def _control_groups(root: Path) -> list[Path]:
    """Return the folders of this process's CPU control groups and their parents, for either version of the interface.

    In a container, the path often belongs to the host, and only the container's own group is mounted.
    """
    folders = list[Path]()
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        mounts = [root / "sys/fs/cgroup" / name for name in (("cpu", controllers) if controllers else ("",))]
        inner = Path(path.lstrip("/"))
        folders += [mount / level for mount in mounts for level in (inner, *inner.parents)]
    return folders


def _quota(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    if not period:
        quota, period = (_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
