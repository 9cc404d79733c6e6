"""CPU threads of a rank.

The threads of a matrix product all wait for the slowest one, so several threads can be slower than one, for two
reasons. In a small model, a product takes less time than waking a thread. On a machine that also runs other programs,
one of the threads often waits for a CPU; if OpenMP makes the others spin, they occupy the CPU it waits for, and a step
takes ten times as long. The command line therefore makes waiting threads sleep
(:func:`~megastack.launch.environment.let_threads_sleep`), and a small model uses one thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megastack.config.schema import TrainConfig
from megastack.errors import counted
from megastack.launch.environment import cpus_of_task, lets_threads_sleep
from megastack.mesh.environment import local_world_size

WORK_PER_THREAD = 2**23
"""Multiplications and additions that justify one more thread, about a quarter of a millisecond."""


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
