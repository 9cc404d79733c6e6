"""The identity of a process, which lets another process determine whether it is still running.

A process id alone is not sufficient: ids are reused, and they differ between containers and machines. The kernel's boot
id and the pid namespace identify where the id is valid, and the start time distinguishes processes with the same id.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from megastack.records import integer, number, string

PROC = Path("/proc")
_DEAD = ("Z", "X", "x")


@dataclass(frozen=True)
class Process:
    """A process.

    Attributes:
        host: the host name, for display only.
        boot: the kernel's boot id; empty if the system has none.
        namespace: the pid namespace, which differs between containers; empty if the system has none.
        pid: the process id.
        ticks: the start time in clock ticks since boot; 0 if unknown.
        started: the start time in unix seconds.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    ticks: int
    started: float

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        return cls._of(os.getpid())

    @classmethod
    def parent(cls) -> Process:
        """Return the parent of this process."""
        return cls._of(os.getppid())

    @classmethod
    def _of(cls, pid: int) -> Process:
        ticks = (_stat(pid) or ("", 0))[1]
        return cls(socket.gethostname(), _boot_id(), _namespace(), pid, ticks, _unix_time(ticks))

    @property
    def key(self) -> str:
        """A text that identifies the process across all machines."""
        return f"{self.host} {self.boot} {self.namespace} {self.pid} {self.ticks}"

    @classmethod
    def from_record(cls, record: Mapping[str, object]) -> Process:
        """Inverse of :meth:`as_json`.

        Raises:
            RecordError: the record is not a valid process.
        """
        words = {name: string(record, name) for name in ("host", "boot", "namespace")}
        pid, ticks = integer(record, "pid", least=1, most=2**31), integer(record, "ticks")
        return cls(**words, pid=pid, ticks=ticks, started=number(record, "started", least=0))

    def as_json(self) -> dict[str, object]:
        """Return the process as a JSON object."""
        return asdict(self)

    def is_alive(self, observer: Process) -> bool | None:
        """Whether the process is running, as seen by the calling process ``observer``; ``None`` if this is unknown.

        It is unknown for a process of another kernel or pid namespace, and for the observer itself: a program that
        replaced itself (``exec``) keeps its id and start time.
        """
        same_place = (self.boot, self.namespace) == (observer.boot, observer.namespace) and bool(self.boot)
        if not same_place or (self.pid, self.ticks) == (observer.pid, observer.ticks):
            return None
        found = _stat(self.pid)
        if not _exists(self.pid):
            return False
        if found is None or not self.ticks:
            return None  # hidden from this user
        state, ticks = found
        return state not in _DEAD and ticks == self.ticks

    def __str__(self) -> str:
        try:
            when = datetime.fromtimestamp(self.started).astimezone().isoformat(" ", "seconds")
        except (ValueError, OverflowError, OSError):
            when = "an unknown time"
        return f"process {self.pid} on host {self.host}, started {when}"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's process
    return True


def _stat(pid: int) -> tuple[str, int] | None:
    """Return the state and start time of a process; ``None`` if they cannot be read."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # the preceding name may contain any characters
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink(PROC / "self/ns/pid")
    return ""


def _unix_time(ticks: int) -> float:
    """Return when a process started; the current time if unknown."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (PROC / "stat").read_text(encoding="ascii").splitlines()
        booted = int(next(line for line in lines if line.startswith("btime ")).split()[1])
        if ticks:
            return booted + ticks / os.sysconf("SC_CLK_TCK")
    return time.time()
