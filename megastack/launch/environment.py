"""Ranks that somebody else started: torchrun and srun.

``RANK`` and ``WORLD_SIZE`` tell a worker of torchrun; a numeric ``SLURM_STEP_ID`` one of srun (a batch script itself
has none), whose variables are translated to torch's.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping

from megastack.observe.claims import Job
from megastack.observe.process import Process

BASE_PORT, PORTS = 20000, 20000
WAIT_POLICY = "OMP_WAIT_POLICY"


def is_worker(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is a rank of a world that exists already."""
    env = os.environ if environment is None else environment
    return ("RANK" in env and "WORLD_SIZE" in env) or in_slurm_step(env)


def in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process."""
    return env.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PROCID" in env and "SLURM_NTASKS" in env


def adopt_slurm(environment: MutableMapping[str, str] | None = None) -> None:
    """Set torch's rank variables from Slurm's; variables that are set already stay."""
    env = os.environ if environment is None else environment
    if "RANK" in env or not in_slurm_step(env):
        return
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    job = int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "0")) or 0)
    env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]
    env.setdefault("LOCAL_RANK", env.get("SLURM_LOCALID", "0"))
    env.setdefault("LOCAL_WORLD_SIZE", _tasks_here(env))
    env.setdefault("MASTER_ADDR", first_node(nodes))
    env.setdefault("MASTER_PORT", str(BASE_PORT + (job * 31 + int(env["SLURM_STEP_ID"])) % PORTS))


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list, e.g. ``gpu003`` of ``gpu[003-005,9],cpu1``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return nodes if match is None else "".join(part or "" for part in match.groups())


def is_first_rank(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process speaks for its world: rank 0, and any process that is no rank."""
    env = os.environ if environment is None else environment
    return not is_worker(env) or env.get("RANK", env.get("SLURM_PROCID")) == "0"


def world_size(environment: Mapping[str, str] | None = None) -> int | None:
    """The number of ranks that the launcher started; ``None`` without a launcher."""
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["WORLD_SIZE"])
    return int(env["SLURM_NTASKS"]) if in_slurm_step(env) else None


def nodes(environment: Mapping[str, str] | None = None) -> int | None:
    """The number of machines that the launcher uses; ``None`` where it does not tell."""
    env = os.environ if environment is None else environment
    found = env.get("GROUP_WORLD_SIZE", env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "")))
    return int(found) if found.isdigit() else None


def cpus_of_task(environment: Mapping[str, str] | None = None) -> int | None:
    """The CPUs that Slurm gave this rank for itself; ``None`` where it does not tell."""
    env = os.environ if environment is None else environment
    found = env.get("SLURM_CPUS_PER_TASK", "")
    return int(found) if in_slurm_step(env) and found.isdigit() and int(found) else None


def let_threads_sleep(environment: MutableMapping[str, str] | None = None) -> None:
    """Have OpenMP's threads sleep while they wait for each other, unless the user says otherwise.

    OpenMP reads its variables when it is loaded, so nothing is changed where torch has been imported already.
    """
    if "torch" not in sys.modules:
        (os.environ if environment is None else environment).setdefault(WAIT_POLICY, "passive")


def lets_threads_sleep(environment: Mapping[str, str] | None = None) -> bool:
    """Whether OpenMP's threads sleep while they wait for each other; else they spin, and keep their CPU from others."""
    env = os.environ if environment is None else environment
    return env.get(WAIT_POLICY, "").strip().lower() == "passive"


def has_agent(environment: Mapping[str, str] | None = None) -> bool:
    """Whether an elastic agent, as that of torchrun, is the parent of this process."""
    env = os.environ if environment is None else environment
    return "TORCHELASTIC_RUN_ID" in env


def shares_store(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the ranks' store is one that elastic agents keep over all starts."""
    env = os.environ if environment is None else environment
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def job(environment: Mapping[str, str] | None = None) -> Job:
    """What this process is a start of: torchrun's rendezvous or its own agent, and the Slurm job."""
    env = os.environ if environment is None else environment
    group, requeues = None, env.get("SLURM_RESTART_COUNT", "0")
    if has_agent(env):
        name = env["TORCHELASTIC_RUN_ID"]
        group = f"agent {Process.parent().key}" if name in ("", "none") else f"rendezvous {name}"
    return Job(group, env.get("SLURM_JOB_ID"), int(requeues) if requeues.isdecimal() else 0)


def _tasks_here(env: Mapping[str, str]) -> str:
    """Tasks on a node: the first count of e.g. ``4(x2),3``; only the division of threads depends on it."""
    return re.split(r"\D", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_NTASKS_PER_NODE", "1")))[0] or "1"
