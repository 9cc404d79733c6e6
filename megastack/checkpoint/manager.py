"""A run's checkpoints: written when the run says so, reported once they are published, thinned out by policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from megastack.checkpoint.folder import keep_last
from megastack.checkpoint.items import State
from megastack.checkpoint.publish import Guard, step_name
from megastack.checkpoint.save import SaveHandle, save
from megastack.checkpoint.usable import Verified
from megastack.mesh.mesh import Mesh

VERIFIES_S = 30.0
"""For how long a save may read checkpoints of earlier processes to find out whether they count."""


@dataclass(frozen=True)
class Saved:
    """A published checkpoint.

    Attributes:
        step: the step it is named for.
        path: its folder.
        seconds: the wall time that it added to the run on this rank, waiting for it included.
        write_seconds: from the call until this rank had nothing left to write.
    """

    step: int
    path: Path
    seconds: float
    write_seconds: float


class CheckpointManager:
    """Saves into one ``checkpoints`` folder, blocking or not.

    Args:
        folder: where ``step_…`` folders go.
        mesh: all of its ranks make the same calls.
        asynchronous: write while training goes on; one checkpoint at a time.
        keep: how many of the newest complete checkpoints stay; ``None`` keeps all.
        every: steps that this divides stay as well.
        guard: raises where this run may no longer write, called on the first rank before it does.
        loaded: a checkpoint that was read in full just now, and need not be read again to count.
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
        self._verified = Verified()
        if keep is not None and loaded is not None and mesh.rank == 0:
            self._verified.trust(loaded)
        self._pending: tuple[int, SaveHandle] | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank still writes."""
        return self._pending is not None and not self._pending[1].done

    def save(self, step: int, state: State) -> list[Saved]:
        """Save a step; returns what was published by now: this step, or an earlier one that was still being written.

        Raises:
            CheckpointError: on every rank, when any rank failed, with this checkpoint or the one before.
        """
        earlier = self.settle()
        path = self._folder / step_name(step)
        self._pending = step, save(path, state, self._mesh, asynchronous=self._asynchronous, guard=self._guard)
        return earlier if self._asynchronous else [*earlier, *self.settle()]

    def settle(self) -> list[Saved]:
        """Wait for what is being written and return it; all ranks call.

        Raises:
            CheckpointError: on every rank, when any rank failed.
        """
        if self._pending is None:
            return []
        (step, handle), self._pending = self._pending, None
        began = time.perf_counter()
        path = handle.wait()
        waited = time.perf_counter() - began
        if self._mesh.rank == 0:
            self._thin_out(step, path)
        return [Saved(step, path, handle.held_up_s + waited, handle.seconds)]

    def _thin_out(self, step: int, path: Path) -> None:
        """Remove what the policy does not keep; what this process wrote or loaded is not read again."""
        if self._keep is None:
            return
        if self._guard is not None:
            self._guard()
        self._verified.trust(path)
        keep_last(self._folder, self._keep, every=self._every, upto=step, verified=self._verified, limit_s=VERIFIES_S)
