"""Reads and validates the rank variables of the environment, in one place.

torchrun sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. A
numeric ``SLURM_STEP_ID`` identifies an srun task, whose variables are translated to the same values; torch's variables
take precedence. :func:`read_environment` returns ``None`` without a launcher, and raises one error that lists every
invalid variable.

The port of a Slurm step is derived from its job and step ids, so all nodes derive the same one. It lies in a fixed
range, :data:`PORTS`, because kernel settings may differ between nodes. The range is above the well-known ports and the
services of Slurm, below torchrun's default (29500), and below Linux's default range of ephemeral ports (32768-60999),
from which an outgoing connection could occupy the port first. On a cluster whose ephemeral ports start lower, set
``MASTER_PORT`` or reserve the range (``net.ipv4.ip_local_reserved_ports``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megastack.errors import MeshError, RankEnvironmentError, Violation
from megastack.mesh.hostlist import first_host

PORTS = range(20000, 29500)
"""The range of ports for Slurm steps."""
_SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm numbers the batch, external and interactive steps of a job from the top of 32 bits."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_START = "start with torchrun or srun"


@dataclass(frozen=True)
class RankEnvironment:
    """The rank variables of this process; ``None`` for variables that the launcher does not set.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        local_rank: the index of this rank on its machine.
        local_world_size: the number of ranks on its machine.
        address: the machine of rank 0.
        port: the port at which rank 0 listens.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str | None = None
    port: int | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """The variables that a rendezvous needs and the launcher does not set."""
        found = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        return tuple(name for name, value in found.items() if value is None)

    def require_endpoint(self) -> tuple[str, int]:
        """The address and the port at which rank 0 listens.

        Raises:
            RankEnvironmentError: the launcher does not set them.
        """
        if self.address is None or self.port is None:
            raise RankEnvironmentError(
                f"RANK={self.rank}, WORLD_SIZE={self.world_size}: {' and '.join(self.missing)} "
                f"{'is' if len(self.missing) == 1 else 'are'} not set, so ranks cannot find each other; {_START}, or "
                "unset RANK and WORLD_SIZE if no launcher started this process"
            )
        return self.address, self.port

    def as_variables(self) -> dict[str, str]:
        """The values as torch's variables."""
        values = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def read_environment(environment: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """The rank variables of this process; ``None`` without a launcher.

    Raises:
        RankEnvironmentError: variables are missing, malformed or contradict each other; the message names all of them.
    """
    env = os.environ if environment is None else environment
    reader = _Reader(env)
    if "RANK" not in env and in_slurm_step(env):
        found = _from_slurm(reader)
    elif "RANK" in env or "WORLD_SIZE" in env:
        found = _from_torchrun(reader)
    else:
        return None
    reader.require_valid()
    return found


def in_slurm_step(env: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script and an interactive step are not tasks of srun."""
    step = env.get("SLURM_STEP_ID", "")
    return bool(_NUMBER.fullmatch(step)) and int(step) < _SPECIAL_STEPS and "SLURM_PROCID" in env


def has_agent(environment: Mapping[str, str] | None = None) -> bool:
    """Whether an elastic agent, such as torchrun's, is the parent of this process."""
    env = os.environ if environment is None else environment
    return "TORCHELASTIC_RUN_ID" in env


def agent_serves_store(environment: Mapping[str, str] | None = None) -> bool:
    """Whether an elastic agent, such as torchrun's, serves the store, and keeps it across restarts."""
    env = os.environ if environment is None else environment
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def local_rank(environment: Mapping[str, str] | None = None) -> int | None:
    """The index of this rank on its machine; ``None`` if no variable is set.

    Raises:
        RankEnvironmentError: a variable is invalid.
    """
    found = read_environment(environment)
    return _read_single("LOCAL_RANK", 0, environment) if found is None else found.local_rank


def local_world_size(environment: Mapping[str, str] | None = None) -> int | None:
    """The number of ranks on this machine; ``None`` if no variable is set.

    Raises:
        RankEnvironmentError: a variable is invalid.
    """
    found = read_environment(environment)
    return _read_single("LOCAL_WORLD_SIZE", 1, environment) if found is None else found.local_world_size


def _read_single(name: str, least: int, environment: Mapping[str, str] | None) -> int | None:
    """Read one variable of a process without a launcher."""
    reader = _Reader(os.environ if environment is None else environment)
    value = reader.number(name, least, optional=True)
    reader.require_valid()
    return value


class _Reader:
    """Reads variables and collects their errors."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self._errors = list[Violation | str]()

    def reject(self, name: str, rule: str, *advice: Any) -> None:
        self._errors.append(Violation(name, self.env.get(name, ""), rule, advice))

    def number(self, name: str, least: int = 0, most: int | None = None, *, optional: bool = False) -> int | None:
        """Read an integer; ``None`` if it is unset or invalid. An unset variable is an error unless ``optional``."""
        if name not in self.env:
            if not optional:
                self._errors.append(f"{name}: is not set; {_START}, or set {name}")
            return None
        text = self.env[name].strip()
        value = int(text) if _NUMBER.fullmatch(text) else None
        if value is not None and least <= value and (most is None or value <= most):
            return value
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        self.reject(name, f"must be a whole number {limits}", f"a number {limits}")
        return None

    def pair(self, rank: str, size: str) -> tuple[int | None, int | None]:
        """A rank and the number of ranks."""
        place, count = self.number(rank), self.number(size, 1)
        if place is not None and count is not None and place >= count:
            self.reject(rank, f"must be less than {size}={count}", f"0 to {count - 1}")
        return place, count

    def require_valid(self) -> None:
        if self._errors:
            raise RankEnvironmentError("\n".join(map(str, self._errors)))


def _from_torchrun(reader: _Reader) -> RankEnvironment | None:
    env = reader.env
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        here, absent = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
        advice = (f"unset {here} to run without a launcher", "torchrun", "srun")
        reader.reject(here, f"{absent} is not set, and both belong together", *advice)
        return None
    rank, size = reader.pair("RANK", "WORLD_SIZE")
    local = reader.number("LOCAL_RANK", optional=True)
    local_size = reader.number("LOCAL_WORLD_SIZE", 1, optional=True)
    if size is not None and local_size is not None and local_size > size:
        reader.reject("LOCAL_WORLD_SIZE", f"must not exceed WORLD_SIZE={size}", f"1 to {size}")
    elif (most := local_size or size) is not None and local is not None and local >= most:
        name = "WORLD_SIZE" if local_size is None else "LOCAL_WORLD_SIZE"
        reader.reject("LOCAL_RANK", f"must be less than {name}={most}", f"0 to {most - 1}")
    return _rank_environment(reader, rank, size, local, local_size)


def _from_slurm(reader: _Reader) -> RankEnvironment | None:
    rank, size = reader.pair("SLURM_PROCID", "SLURM_NTASKS")
    local = reader.number("LOCAL_RANK" if "LOCAL_RANK" in reader.env else "SLURM_LOCALID", optional=True) or 0
    if "LOCAL_WORLD_SIZE" in reader.env:
        here = reader.number("LOCAL_WORLD_SIZE", 1, size)
        if here is not None and local >= here:
            reader.reject("LOCAL_WORLD_SIZE", f"must exceed the local rank {local}", f"{local + 1} or more")
    else:
        here = max(local + 1, _tasks_on_node(reader))
    return _rank_environment(reader, rank, size, local, here)


def _rank_environment(
    reader: _Reader, rank: int | None, size: int | None, local: int | None, local_size: int | None
) -> RankEnvironment | None:
    address, port = _address(reader), _port(reader)
    if rank is None or size is None:
        return None  # the reader raises
    return RankEnvironment(rank, size, local, local_size, address, port)


def _address(reader: _Reader) -> str | None:
    env = reader.env
    if "MASTER_ADDR" in env:
        if not env["MASTER_ADDR"].strip():
            reader.reject("MASTER_ADDR", "must name the machine of rank 0", "its host name", "its address")
        return env["MASTER_ADDR"].strip()
    if "RANK" in env:
        return None
    name = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if name in env), None)
    try:
        return "127.0.0.1" if name is None else first_host(env[name])
    except MeshError as error:
        reader.reject(name or "", f"{error}, so the machine of rank 0 is unknown", "MASTER_ADDR=HOST")
        return None


def _port(reader: _Reader) -> int | None:
    env = reader.env
    if "MASTER_PORT" in env:
        return reader.number("MASTER_PORT", 1, 65535)
    if "RANK" in env:
        return None
    job, step = reader.number("SLURM_JOB_ID", optional=True), reader.number("SLURM_STEP_ID")
    return PORTS[((job or 0) * 31 + (step or 0)) % len(PORTS)]


def _tasks_on_node(reader: _Reader) -> int:
    """The number of tasks on this node, from e.g. ``4(x2),3``; it only affects the number of threads."""
    env = reader.env
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in env else "SLURM_NTASKS_PER_NODE"
    counts, node = list[int](), reader.number("SLURM_NODEID", optional=True) or 0
    for item in env.get(name, "1").split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item.strip())
        if match is None:
            reader.reject(name, "must be counts of tasks such as 4(x2),3", "LOCAL_WORLD_SIZE=N")
            return 1
        if node < int(match[2] or 1):
            return int(match[1])
        node -= int(match[2] or 1)
        counts.append(int(match[1]))
    return counts[0]
