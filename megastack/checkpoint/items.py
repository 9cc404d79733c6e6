"""What a part of the training state says about itself: names, global shapes, and the boxes that this rank holds.

Model, optimizer and loss scaler each yield :class:`StateItem` values; a tensor-parallel shard is one box, a slice of a
flat optimizer state a few. Nothing else describes a layout, so a checkpoint of any layout loads on any other. An item
holds views: saving reads them, loading writes into them.

Names begin with what they belong to: ``model/blocks.0.mlp.up.weight``, ``optim/exp_avg/blocks.0.mlp.up.weight``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from megastack.checkpoint.cover import describe, whole
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The safetensors name of each dtype that a checkpoint can hold."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class StateItem:
    """A named global tensor and the boxes of it that this rank holds.

    Attributes:
        name: global name, the same on every rank and layout.
        shape: logical global shape, without padding.
        boxes: pairs of a box and the tensor (usually a view) with its elements; empty where the rank holds none.
        replica: this rank's coordinates in words, where all ranks that hold a box must hold the same bits of it, which
            a save then checks; ``None`` where nothing but the layout could make them differ.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[Box, Tensor], ...]
    replica: str | None = None

    @classmethod
    def replicated(cls, name: str, tensor: Tensor) -> StateItem:
        """An item that every rank holds whole; one of them writes it, all of them read it."""
        return cls(name, tuple(tensor.shape), ((whole(tensor.shape), tensor),))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype, where this rank holds a box."""
        return self.boxes[0][1].dtype if self.boxes else None

    def filled_boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """The boxes that hold elements (of a tensor without elements, all)."""
        return ((box, tensor) for box, tensor in self.boxes if prod(box.size) or not prod(self.shape))

    def checksums(self) -> Iterator[tuple[Box, str]]:
        """Each box with a checksum of its bits, where ranks that hold the same box are to be compared."""
        if self.replica is not None:
            yield from ((box, _checksum(tensor)) for box, tensor in self.filled_boxes())

    def errors(self) -> Iterator[str]:
        """What is wrong with the item by itself, one message each."""
        for box, tensor in self.boxes:
            if tuple(tensor.shape) != tuple(box.size):
                yield f"{self.name}: box {describe(box)} comes with a tensor of shape {tuple(tensor.shape)}"
            if tensor.dtype != self.dtype or tensor.dtype not in DTYPE_NAMES:
                yield f"{self.name}: dtype {tensor.dtype} is not one dtype that a checkpoint can hold"


def _checksum(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=8).hexdigest()


@dataclass
class State:
    """All that a checkpoint holds: tensors by item, and the trainer's own state as a JSON object."""

    items: Sequence[StateItem]
    trainer: dict[str, Any] = field(default_factory=dict)

    def by_name(self) -> dict[str, StateItem]:
        """The items by name.

        Raises:
            CheckpointError: naming every item that is given twice or does not fit its tensors.
        """
        named = {item.name: item for item in self.items}
        errors = [error for item in self.items for error in item.errors()]
        counts = Counter(item.name for item in self.items)
        errors += [f"{name}: given {count} times" for name, count in counts.items() if count > 1]
        if errors:
            raise CheckpointError("\n".join(errors))
        return named
