"""What one asynchronous save leaves for the next: the plan, if the state keeps its shape, and memory for the copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megastack.checkpoint.collectives import all_true, plan_together
from megastack.checkpoint.items import State
from megastack.checkpoint.planners import BoxSavePlanner
from megastack.checkpoint.publish import Guard
from megastack.checkpoint.recovery import begin
from megastack.checkpoint.write import trainer_text
from megastack.comm.group import AxisGroup
from megastack.errors import MegastackError

_ALIGNMENT = 16


class Staging:
    """Memory that holds a copy of a rank's share of a state; it grows when it has to and is used again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies on the CPU, valid until the next call."""
        sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        if sum(sizes) > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=bool(devices))
        copies, start = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            room = self._buffer[start : start + tensor.numel() * tensor.element_size()]
            copies.append(room.view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor.detach(), non_blocking=True)
            start += size
        for device in devices:
            torch.cuda.synchronize(device)
        return copies


@dataclass(frozen=True)
class Share:
    """What this rank is to write, and on the first rank a description of the whole.

    Attributes:
        items: the planned boxes.
        tensors: the live tensor of each.
        metadata: of all ranks' boxes; ``None`` but on the first rank.
        trainer: the text of ``trainer.json``, likewise.
    """

    items: Sequence[WriteItem]
    tensors: Sequence[Tensor]
    metadata: Metadata | None = None
    trainer: str = ""


def plan_share(path: Path, state: State, world: AxisGroup, guard: Guard | None = None) -> Share:
    """Agree on who writes what, and make the folder; all ranks call.

    Raises:
        CheckpointError: on every rank, when any rank's state or the folder does not do.
    """
    planner = BoxSavePlanner(state)
    whole: list[tuple[Metadata, str]] = []

    def own() -> SavePlan:
        planner.set_up_planner({})
        return planner.create_local_plan()

    def everyone(plans: list[SavePlan]) -> list[SavePlan]:
        shares, metadata = planner.create_global_plan(plans)
        whole.append((metadata, trainer_text(state.trainer)))
        begin(path, guard)
        return shares

    items = plan_together(f"{path}: was not saved", world, own, everyone).items
    return Share(items, [planner.tensor(item) for item in items], *(whole[0] if whole else ()))


class Kept:
    """The plan and the staging memory of a mesh's asynchronous saves."""

    def __init__(self) -> None:
        self.staging = Staging()
        self._layout: Any = None
        self._share: Share | None = None

    def plan(self, path: Path, state: State, world: AxisGroup, guard: Guard | None = None) -> Share:
        """The last plan where no rank's state has changed its layout, else a new one; all ranks call.

        Replicas that have to be compared are, since only a new plan does: what is compared counts as layout.

        Raises:
            CheckpointError: as :func:`plan_share`.
        """
        layout = [
            (
                item.name,
                item.shape,
                [(box, tensor.shape, tensor.dtype) for box, tensor in item.boxes],
                [*item.checksums()],
            )
            for item in state.items
        ]
        trainer = _opened(path, state, world, guard) if layout == self._layout else None
        if all_true(trainer is not None, world) and self._share is not None:
            tensors = {(item.name, box.offset): tensor for item in state.items for box, tensor in item.boxes}
            found = [tensors[item.index.fqn, tuple(item.index.offset or ())] for item in self._share.items]
            return replace(self._share, tensors=found, trainer=trainer or "")
        share = plan_share(path, state, world, guard)
        self._layout, self._share = layout, replace(share, tensors=())
        return share


def _opened(path: Path, state: State, world: AxisGroup, guard: Guard | None) -> str | None:
    """The trainer's text, on the first rank once the folder is made; ``None`` where planning anew says why not."""
    if world.rank:
        return ""
    try:
        text = trainer_text(state.trainer)
        begin(path, guard)
    except (MegastackError, OSError):
        return None
    return text
