"""Ownership of a run folder: one process at a time may write into it, on any machine.

If the owner has released the folder or is dead, the next claim takes it over (:mod:`megastack.observe.claims`). An
owner in the same container of the same machine is dead if its process has ended (:mod:`megastack.observe.process`). Any
other owner counts as dead if its claim has not changed for :data:`LIMIT_S`. The owner touches its claim every
:data:`HEARTBEAT_S`, which works even on a full disk, and the observer uses its own clock, so clocks need not be
synchronised. A later start of the same job supersedes an earlier one, which may still run if its launcher lost it.

A superseded owner detects this in :meth:`Ownership.require`, which it calls before it writes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megastack.errors import MegastackError
from megastack.observe.claims import (
    FOLDER,
    Claim,
    Job,
    claim_path,
    create_claim,
    highest,
    newest_claim,
    release_claim,
)
from megastack.observe.process import Process

HEARTBEAT_S = 10.0
"""How often an owner touches its claim."""
LIMIT_S = 60.0
"""An owner whose process cannot be checked counts as dead if its claim has not changed for this long."""
POLL_S = 0.5
RECHECK_S = 1.0
"""How long an owner relies on its last check, unless it is about to publish a checkpoint."""


class FolderInUse(MegastackError):
    """The owner of a run folder is alive; the message names the owner."""


class TakenOver(MegastackError):
    """A later owner has taken over the folder of this run."""


@dataclass(frozen=True)
class Ownership:
    """A claim to a run folder; every rank of the run holds this value.

    Attributes:
        folder: the run folder.
        number: the number of the claim.
        token: unique to this owner.
    """

    folder: Path
    number: int
    token: str

    @property
    def held(self) -> bool:
        """Whether no later claim exists."""
        try:
            return highest(self.folder) <= self.number
        except OSError:
            return True  # an unreachable file system proves nothing

    def require(self) -> None:
        """Check the ownership; call before writing data that others rely on.

        Raises:
            TakenOver: there is a later owner.
        """
        if not self.held:
            later = newest_claim(self.folder)
            raise TakenOver(f"{self.folder}: was taken over by {later}; this run ends and writes nothing more there")

    def release(self) -> None:
        """Release the folder; if the claim cannot be written, the next start takes it over."""
        if self.held:
            with contextlib.suppress(OSError):
                release_claim(self.folder, self.number, self.token)

    def discard(self) -> None:
        """Remove the claim to a folder that will be removed."""
        with contextlib.suppress(OSError):
            claim_path(self.folder, self.number).unlink()
            (self.folder / FOLDER).rmdir()


class Heartbeat:
    """A context manager in which a thread touches a claim; on any exit, the claim is released.

    A forked child neither touches nor releases the claim.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            return
        self._stop.set()
        self._thread.join()
        self._ownership.release()

    def _beat(self) -> None:
        path = claim_path(self._ownership.folder, self._ownership.number)
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # a later owner removes it
                os.utime(path)


class OwnershipGuard:
    """Checks the ownership at most once per :data:`RECHECK_S`; :meth:`now` always checks."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._checked: float | None = None

    def __call__(self) -> None:
        """Check, unless the last check is recent.

        Raises:
            TakenOver: there is a later owner.
        """
        if self._checked is None or time.monotonic() - self._checked >= RECHECK_S:
            self.now()

    def now(self) -> None:
        """Check immediately.

        Raises:
            TakenOver: there is a later owner.
        """
        now = time.monotonic()
        self._ownership.require()
        self._checked = now


def living_owner(folder: Path, job: Job) -> Claim | None:
    """Return the claim that prevents a start of ``job`` in a run folder; ``None`` if the folder is free. Only reads.

    Waits up to :data:`LIMIT_S` if the owner is on another machine or in another container.
    """
    claim = newest_claim(folder)
    if claim.released or job.supersedes(claim.job):
        return None
    alive = None if claim.owner is None else claim.owner.is_alive(Process.current())
    if alive is None:
        return _watch(folder, claim)
    return claim if alive else None


def take_ownership(folder: Path, job: Job) -> Ownership:
    """Claim an existing run folder that is free.

    Raises:
        FolderInUse: the owner of the folder is alive, or another start claimed it first.
        OSError: the claim cannot be written.
    """
    while True:
        number = highest(folder)
        if (living := living_owner(folder, job)) is not None:
            raise FolderInUse(str(living))
        if (token := create_claim(folder, number + 1, job)) is not None:
            return Ownership(folder, number + 1, token)


def claim_new(folder: Path, job: Job) -> Ownership | None:
    """Claim a folder that was never claimed; return ``None`` if it was.

    Raises:
        OSError: the claim cannot be written.
    """
    token = create_claim(folder, 1, job)
    return None if token is None else Ownership(folder, 1, token)


def _watch(folder: Path, claim: Claim) -> Claim | None:
    """Return the claim if its owner touches it within the limit, or a later claim; ``None`` if the owner is dead."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        time.sleep(min(POLL_S, LIMIT_S / 10))
        now = newest_claim(folder)
        if now.released:
            return None
        if (now.number, now.mark) != (claim.number, claim.mark):
            return now
    return None
