"""Who may write into a run folder: one process at a time, whatever machines the others are on.

Where the owner has released the folder or is dead, the next claim takes it (:mod:`megastack.observe.claims`). An owner
is dead if its process is gone, where this machine and this container can tell (:mod:`megastack.observe.process`).
Anywhere else it is dead once its claim has not changed for :data:`LIMIT_S`: the owner touches it every
:data:`HEARTBEAT_S`, which takes no room on a full disk, and the observer watches by its own clock, so that clocks need
not agree. A later start of the same job supersedes an earlier one, which may still run where its launcher lost it.

An owner that was superseded learns it from :meth:`Ownership.require`, which it calls before it writes.
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
"""An owner that cannot be looked up is dead when its claim has not changed for so long."""
LOOKS_EVERY_S = 0.5
CHECKED_S = 1.0
"""For how long an owner relies on its last look, where nothing is published."""


class FolderInUse(MegastackError):
    """A run folder has a living owner; the text says which."""


class TakenOver(MegastackError):
    """This run owned its folder, and a later owner has it now."""


@dataclass(frozen=True)
class Ownership:
    """A claim to a run folder; a small value that all ranks of the run hold.

    Attributes:
        folder: the run folder.
        number: of the claim.
        token: unique to this owner.
    """

    folder: Path
    number: int
    token: str

    @property
    def held(self) -> bool:
        """Whether no later claim has taken the place of this one."""
        try:
            return highest(self.folder) <= self.number
        except OSError:
            return True  # a file system that does not answer tells nothing

    def require(self) -> None:
        """Call before anything is written that others rely on.

        Raises:
            TakenOver: there is a later owner.
        """
        if not self.held:
            later = newest_claim(self.folder)
            raise TakenOver(f"{self.folder}: was taken over by {later}; this run ends and writes nothing more there")

    def release(self) -> None:
        """Give the folder back; a claim that cannot be written is left to be taken over."""
        if self.held:
            with contextlib.suppress(OSError):
                release_claim(self.folder, self.number, self.token)

    def discard(self) -> None:
        """Remove the claim to a folder that is to be removed itself."""
        with contextlib.suppress(OSError):
            claim_path(self.folder, self.number).unlink()
            (self.folder / FOLDER).rmdir()


class Heartbeat:
    """A context in which a claim is touched from a thread; at its end the claim is released, whatever the end is.

    The claim stays this process's: a forked child neither touches nor releases it.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._pid = os.getpid()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            return
        self._over.set()
        self._thread.join()
        self._ownership.release()

    def _beat(self) -> None:
        path = claim_path(self._ownership.folder, self._ownership.number)
        while not self._over.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # a later owner removes it
                os.utime(path)


class OwnershipGuard:
    """Calls :meth:`Ownership.require`; where nothing is published, at most once in :data:`CHECKED_S`."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._looked: float | None = None

    def __call__(self) -> None:
        """Look, if the last look is old.

        Raises:
            TakenOver: there is a later owner.
        """
        if self._looked is None or time.monotonic() - self._looked >= CHECKED_S:
            self.now()

    def now(self) -> None:
        """Look.

        Raises:
            TakenOver: there is a later owner.
        """
        began = time.monotonic()
        self._ownership.require()
        self._looked = began


def living_owner(folder: Path, job: Job) -> Claim | None:
    """The claim that keeps a start of ``job`` out of a run folder; ``None`` where it is free. Writes nothing.

    Takes up to :data:`LIMIT_S` where the owner is on another machine or in another container.
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
        FolderInUse: it has an owner that lives, or another start was faster.
        OSError: the claim cannot be written.
    """
    while True:
        number = highest(folder)
        if (living := living_owner(folder, job)) is not None:
            raise FolderInUse(str(living))
        if (token := create_claim(folder, number + 1, job)) is not None:
            return Ownership(folder, number + 1, token)


def claim_new(folder: Path, job: Job) -> Ownership | None:
    """Claim a folder that was never claimed; ``None`` if it was.

    Raises:
        OSError: the claim cannot be written.
    """
    token = create_claim(folder, 1, job)
    return None if token is None else Ownership(folder, 1, token)


def _watch(folder: Path, claim: Claim) -> Claim | None:
    """The claim of an owner that touches it, or of a later one, within the limit."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        time.sleep(min(LOOKS_EVERY_S, LIMIT_S / 10))
        now = newest_claim(folder)
        if now.released:
            return None
        if (now.number, now.mark) != (claim.number, claim.mark):
            return now
    return None
