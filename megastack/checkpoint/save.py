"""Save a training state as one checkpoint from all ranks.

Every rank calls :func:`save` with its own items. Planning gathers the boxes of all ranks on rank 0, which assigns each
box to one rank; then every rank writes its file, and rank 0 collects the checksums and publishes. A save requires two
object collectives and one broadcast over the whole mesh; tensors are not sent. An asynchronous save plans in the same
way and leaves the rest to a thread.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed.checkpoint as dcp

from megastack.checkpoint.asynchronous import AsynchronousSave, SaveCache
from megastack.checkpoint.collectives import checkpoint_errors
from megastack.checkpoint.planners import BoxSavePlanner
from megastack.checkpoint.publish import Guard, discard
from megastack.checkpoint.state import State
from megastack.checkpoint.writer import BoxWriter
from megastack.comm.objects import all_gather_objects
from megastack.errors import CheckpointError, MegastackError
from megastack.mesh.mesh import Mesh


@dataclass(frozen=True)
class SaveHandle:
    """A checkpoint that was saved or is being written.

    Attributes:
        path: its folder.
        blocked_s: how long the call to :func:`save` took.
    """

    path: Path
    blocked_s: float = 0.0
    _writing: AsynchronousSave | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has finished writing; the checkpoint is complete once all ranks have."""
        return self._writing is None or self._writing.done

    @property
    def settled(self) -> bool:
        """Whether all ranks know the outcome."""
        return self._writing is None or self._writing.settled

    @property
    def seconds(self) -> float:
        """Time from the call until this rank finished writing."""
        return self.blocked_s if self._writing is None else self._writing.seconds

    def wait(self) -> Path:
        """Wait until the checkpoint is published and return its folder; called on all ranks after an asynchronous save.

        Raises:
            CheckpointError: the same on every rank, if any rank failed; in this case nothing is published.
        """
        return self.path if self._writing is None else self._writing.wait()


@dataclass
class _MeshSaves:
    """State shared by the saves of one mesh: buffers and plan of asynchronous saves, and the most recent save."""

    cache: SaveCache = field(default_factory=SaveCache)
    last: SaveHandle | None = None


_SAVES: WeakKeyDictionary[Mesh, _MeshSaves] = WeakKeyDictionary()
"""The saves by mesh. A save waits for the previous one: two saves in flight could miss each other's errors."""


def save(
    path: str | Path, state: State, mesh: Mesh, *, asynchronous: bool = False, guard: Guard | None = None
) -> SaveHandle:
    """Write ``state`` to the checkpoint folder ``path``, which appears complete or not at all.

    An existing checkpoint at ``path`` is replaced once the new one is complete; a folder with any other content is an
    error. For a folder named ``step_…``, the file ``latest`` next to it is updated last.

    Args:
        path: the folder, e.g. ``…/checkpoints/step_00000010``; the same on all ranks, on a shared file system.
        state: this rank's items, and the trainer's state (written from rank 0).
        mesh: the mesh; all of its ranks call this function.
        asynchronous: return when this rank's boxes are copied, and write in the background while training continues.
            The call first waits for an earlier asynchronous save.
        guard: called on the first rank before the folder is created and again before it is published; an exception
            that it raises becomes an error of the save.

    Raises:
        CheckpointError: on every rank and with the same message, if any rank fails. In this case nothing is published,
            and the files written so far are removed. Also raised if an earlier asynchronous save of the mesh failed and
            the error has not been reported yet.
    """
    began, target, world = time.perf_counter(), Path(path).absolute(), mesh.world
    saves = _SAVES.setdefault(mesh, _MeshSaves())
    if saves.last is not None and not saves.last.settled:
        saves.last.wait()
    if asynchronous:
        writing = AsynchronousSave(target, state, world, saves.cache, guard)
        saves.last = SaveHandle(target, time.perf_counter() - began, writing)
        return saves.last
    writer = BoxWriter(target, world, state.trainer, guard)
    try:
        with checkpoint_errors(f"{target}: was not saved"), world.blocks("checkpoint_save"):
            dcp.save(
                {},
                storage_writer=writer,
                planner=BoxSavePlanner(state, world.flight_recorder),
                process_group=world.group,
                no_dist=world.group is None,
            )
    except CheckpointError:
        if world.rank == 0:
            with suppress(OSError, MegastackError):
                discard(target, guard)
        all_gather_objects(True, world)  # no rank returns before the files are removed
        raise
    return SaveHandle(target, time.perf_counter() - began)
