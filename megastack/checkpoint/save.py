"""Save a training state as one checkpoint, from all ranks together.

Every rank calls :func:`save` with its own items. Planning gathers the boxes of all ranks on rank 0 and sends each its
share; then every rank writes its file, rank 0 collects the checksums and publishes. Two object collectives and one
broadcast over the whole mesh; tensors never travel.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed.checkpoint as dcp

from megastack.checkpoint.items import State
from megastack.checkpoint.planners import BoxSavePlanner
from megastack.checkpoint.publish import withdraw
from megastack.checkpoint.storage import BoxWriter
from megastack.checkpoint.together import gather, one_error
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh


@dataclass(frozen=True)
class SaveHandle:
    """A checkpoint that was saved."""

    path: Path

    def wait(self) -> Path:
        """Return its folder once it is published."""
        return self.path


def save(path: str | Path, state: State, mesh: Mesh, *, asynchronous: bool = False) -> SaveHandle:
    """Write ``state`` as the checkpoint folder ``path``, which appears whole or not at all.

    A checkpoint that is already there is replaced once the new one is complete; a folder that holds anything else is
    refused. For a folder called ``step_…`` the file ``latest`` beside it is moved last.

    Args:
        path: the folder, ``…/checkpoints/step_00000010``; the same on all ranks, on a file system that all of them see.
        state: this rank's items, and the trainer's state (rank 0's is written).
        mesh: all of its ranks call.
        asynchronous: not available yet.

    Raises:
        CheckpointError: on every rank and with the same message, when any rank fails; nothing is published then and
            what was written is removed.
    """
    if asynchronous:
        raise CheckpointError("asynchronous=True: is not available yet; use asynchronous=False")
    target, world = Path(path).absolute(), mesh.world
    writer = BoxWriter(target, world.rank, state.trainer)
    try:
        with one_error(f"{target}: was not saved"):
            dcp.save(
                {},
                storage_writer=writer,
                planner=BoxSavePlanner(state),
                process_group=world.group,
                no_dist=world.group is None,
            )
    except CheckpointError:
        if world.rank == 0:
            with suppress(OSError):
                withdraw(target)
        gather(True, world)
        raise
    return SaveHandle(target)
