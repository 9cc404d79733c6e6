"""Save a training state as one checkpoint, from all ranks together.

Every rank calls :func:`save` with its own items. Planning gathers the boxes of all ranks on rank 0 and sends each its
share; then every rank writes its file, rank 0 collects the checksums and publishes. Two object collectives and one
broadcast over the whole mesh; tensors never travel. An asynchronous save plans in the same way and leaves the rest to
a thread.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed.checkpoint as dcp

from megastack.checkpoint.asynchronous import AsynchronousSave
from megastack.checkpoint.collectives import gather, one_error
from megastack.checkpoint.items import State
from megastack.checkpoint.planners import BoxSavePlanner
from megastack.checkpoint.publish import Guard, withdraw
from megastack.checkpoint.staging import Kept
from megastack.checkpoint.storage import BoxWriter
from megastack.errors import CheckpointError, MegastackError
from megastack.mesh.mesh import Mesh


@dataclass(frozen=True)
class SaveHandle:
    """A checkpoint that was saved, or is being written.

    Attributes:
        path: its folder.
        held_up_s: how long the call to :func:`save` took.
    """

    path: Path
    held_up_s: float = 0.0
    _writing: AsynchronousSave | None = None

    @property
    def done(self) -> bool:
        """Whether this rank has nothing left to write; the checkpoint is whole when that is so on all ranks."""
        return self._writing is None or self._writing.done

    @property
    def told(self) -> bool:
        """Whether all ranks know how it ended."""
        return self._writing is None or self._writing.told

    @property
    def seconds(self) -> float:
        """From the call to the end of the writing, on this rank."""
        return self.held_up_s if self._writing is None else self._writing.seconds

    def wait(self) -> Path:
        """Return the folder once it is published; after an asynchronous save all ranks call, and all come back.

        Raises:
            CheckpointError: the same on every rank, when any rank failed; nothing was published then.
        """
        return self.path if self._writing is None else self._writing.wait()


@dataclass
class _Writer:
    """What an asynchronous save of a mesh leaves behind for the next."""

    kept: Kept = field(default_factory=Kept)
    last: SaveHandle | None = None


_WRITERS: WeakKeyDictionary[Mesh, _Writer] = WeakKeyDictionary()
"""By mesh, which goes with it: two saves at a time would not know of each other's folders and failures."""


def save(
    path: str | Path, state: State, mesh: Mesh, *, asynchronous: bool = False, guard: Guard | None = None
) -> SaveHandle:
    """Write ``state`` as the checkpoint folder ``path``, which appears whole or not at all.

    A checkpoint that is already there is replaced once the new one is complete; a folder that holds anything else is
    refused. For a folder called ``step_…`` the file ``latest`` beside it is moved last.

    Args:
        path: the folder, ``…/checkpoints/step_00000010``; the same on all ranks, on a file system that all of them see.
        state: this rank's items, and the trainer's state (rank 0's is written).
        mesh: all of its ranks call.
        asynchronous: return when this rank's share is copied, and write while training goes on. An earlier one is
            waited for first.
        guard: called on the first rank before the folder is made and before it is published; what it raises is an error
            of the save.

    Raises:
        CheckpointError: on every rank and with the same message, when any rank fails; nothing is published then and
            what was written is removed. Also when the mesh's earlier asynchronous save failed and nobody was told.
    """
    began, target, world = time.perf_counter(), Path(path).absolute(), mesh.world
    writer = _WRITERS.setdefault(mesh, _Writer())
    if writer.last is not None and not writer.last.told:
        writer.last.wait()
    if asynchronous:
        writing = AsynchronousSave(target, state, world, writer.kept, guard)
        writer.last = SaveHandle(target, time.perf_counter() - began, writing)
        return writer.last
    storage = BoxWriter(target, world, state.trainer, guard)
    try:
        with one_error(f"{target}: was not saved"), world.blocks("checkpoint_save"):
            dcp.save(
                {},
                storage_writer=storage,
                planner=BoxSavePlanner(state, world.flight_recorder),
                process_group=world.group,
                no_dist=world.group is None,
            )
    except CheckpointError:
        if world.rank == 0:
            with suppress(OSError, MegastackError):
                withdraw(target, guard)
        gather(True, world)
        raise
    return SaveHandle(target, time.perf_counter() - began)
