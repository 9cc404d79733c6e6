"""The checkpoint manager of a run: saves synchronously or asynchronously, and removes old checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from megastack.checkpoint.folder import keep_last
from megastack.checkpoint.integrity import VerifiedFiles
from megastack.checkpoint.publish import Guard, step_name
from megastack.checkpoint.save import SaveHandle, save
from megastack.checkpoint.state import State
from megastack.mesh.mesh import Mesh

VERIFY_LIMIT_S = 30.0
"""How long one save may spend verifying checkpoints of earlier processes."""


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A published checkpoint.

    Attributes:
        step: the step in its name.
        path: its folder.
        seconds: wall time that it added to the run on this rank, including waiting.
        write_seconds: time from the call until this rank finished writing.
    """

    step: int
    path: Path
    seconds: float
    write_seconds: float


class CheckpointManager:
    """Saves the steps of a run into one ``checkpoints`` folder.

    Args:
        folder: the folder of the ``step_…`` folders.
        mesh: the mesh; all of its ranks make the same calls.
        asynchronous: write while training continues; one checkpoint is in flight at a time.
        keep: how many of the newest usable checkpoints to keep; ``None`` keeps all.
        every: also keep steps that are multiples of this.
        guard: raises if this run may no longer write; called on the first rank before each write.
        loaded: a checkpoint that was just read in full and need not be verified again.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        asynchronous: bool = False,
        keep: int | None = None,
        every: int | None = None,
        guard: Guard | None = None,
        loaded: Path | None = None,
    ) -> None:
        self._folder = folder
        self._mesh = mesh
        self._asynchronous = asynchronous
        self._keep = keep
        self._every = every
        self._guard = guard
        self._verified = VerifiedFiles()
        if keep is not None and loaded is not None and mesh.rank == 0:
            self._verified.add(loaded)
        self._pending: tuple[int, SaveHandle] | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._pending is not None and not self._pending[1].done

    def save(self, step: int, state: State) -> list[PublishedCheckpoint]:
        """Save a step, and return the checkpoints published since: this step's, or an earlier asynchronous save's.

        Raises:
            CheckpointError: on every rank, if any rank failed in this save or in the previous one.
        """
        earlier = self.wait()
        path = self._folder / step_name(step)
        self._pending = step, save(path, state, self._mesh, asynchronous=self._asynchronous, guard=self._guard)
        return earlier if self._asynchronous else [*earlier, *self.wait()]

    def wait(self) -> list[PublishedCheckpoint]:
        """Wait for the pending save and return its checkpoint; empty if none is pending. Called on all ranks.

        Raises:
            CheckpointError: on every rank, if any rank failed.
        """
        if self._pending is None:
            return []
        (step, handle), self._pending = self._pending, None
        began = time.perf_counter()
        path = handle.wait()
        waited = time.perf_counter() - began
        if self._mesh.rank == 0:
            self._remove_old(step, path)
        return [PublishedCheckpoint(step, path, handle.blocked_s + waited, handle.seconds)]

    def _remove_old(self, step: int, path: Path) -> None:
        """Remove checkpoints that the policy does not keep; files that this process wrote or loaded are not reread."""
        if self._keep is None:
            return
        if self._guard is not None:
            self._guard()
        self._verified.add(path)
        keep_last(
            self._folder, self._keep, every=self._every, upto=step, verified=self._verified, limit_s=VERIFY_LIMIT_S
        )
