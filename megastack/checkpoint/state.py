"""The training state as named global tensors, and the boxes of them that this rank holds.

Model, optimizer and loss scaler each describe their state as :class:`StateItem` values. A tensor-parallel shard is one
box of the global tensor; a shard of a flat optimizer state is a few boxes. A checkpoint stores nothing else about the
layout, so it loads on any other layout. Items hold views of the live tensors: saving reads from them, loading writes
into them.

Names start with the part of the state they belong to: ``model/blocks.0.mlp.up.weight``,
``optim/exp_avg/blocks.0.mlp.up.weight``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megastack.comm.objects import all_gather_objects
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import describe_coordinates
from megastack.placement.boxes import Box, describe_box, local_box, whole_box
from megastack.placement.buffers import persistent_buffers
from megastack.placement.module import BoxView, buffer_placements_of, placements_of
from megastack.placement.placement import Placement

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
"""The safetensors name of each dtype that a checkpoint supports."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

WEIGHT_PREFIX = "model/"
"""Prefix of the names of weights and buffers."""


@dataclass(frozen=True)
class StateItem:
    """A named global tensor and the boxes of it that this rank holds.

    Attributes:
        name: global name, the same on every rank and layout.
        shape: logical global shape, without padding.
        boxes: pairs of a box and a tensor (usually a view) with its elements; empty if this rank holds no box.
        replica: this rank's coordinates as text. If set, all replicas of a box must be bit-identical, and a save checks
            this; ``None`` if replicas can differ only through a bug in the layout.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[BoxView, ...]
    replica: str | None = None

    @classmethod
    def replicated(cls, name: str, tensor: Tensor) -> StateItem:
        """Create an item that every rank holds in full; one rank writes it, all ranks read it."""
        return cls(name, tuple(tensor.shape), ((whole_box(tensor.shape), tensor),))

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype; ``None`` if this rank holds no box."""
        return self.boxes[0][1].dtype if self.boxes else None

    def filled_boxes(self) -> Iterator[BoxView]:
        """Yield the boxes with at least one element; all boxes of a tensor without elements."""
        return ((box, tensor) for box, tensor in self.boxes if prod(box.size) or not prod(self.shape))

    def checksums(self) -> Iterator[tuple[Box, str]]:
        """Yield each box with a checksum of its bits; nothing unless ``replica`` is set."""
        if self.replica is not None:
            yield from ((box, _checksum(tensor)) for box, tensor in self.filled_boxes())

    def errors(self) -> Iterator[str]:
        """Yield the errors of this item alone, one message each."""
        for box, tensor in self.boxes:
            if tuple(tensor.shape) != tuple(box.size):
                yield f"{self.name}: box {describe_box(box)} has a tensor of shape {tuple(tensor.shape)}"
            if tensor.dtype != self.dtype or tensor.dtype not in DTYPE_NAMES:
                yield f"{self.name}: dtype {tensor.dtype} is not supported in a checkpoint or differs between boxes"


def _checksum(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=8).hexdigest()


@dataclass
class State:
    """The content of a checkpoint: tensors as items, and the trainer's state as a JSON object."""

    items: Sequence[StateItem]
    trainer: dict[str, Any] = field(default_factory=dict)

    def by_name(self) -> dict[str, StateItem]:
        """Return the items by name.

        Raises:
            CheckpointError: an item occurs twice or does not match its tensors; the message names every such item.
        """
        named = {item.name: item for item in self.items}
        errors = [error for item in self.items for error in item.errors()]
        counts = Counter(item.name for item in self.items)
        errors += [f"{name}: occurs {count} times" for name, count in counts.items() if count > 1]
        if errors:
            raise CheckpointError("\n".join(errors))
        return named


def stage_placements(stages: Sequence[nn.Module]) -> dict[str, Placement]:
    """Return the placement of every parameter of this rank by global name."""
    return {name: placement for stage in stages for name, placement in placements_of(stage).items()}


def items_of(
    prefix: str, tensors: Iterable[tuple[str, Tensor]], placements: Mapping[str, Placement], mesh: Mesh
) -> list[StateItem]:
    """Create items of tensors that are laid out like their parameters, without padding and duplicate names."""
    whole = ((name, ((Box((0,) * x.dim(), tuple(x.shape)), x.detach()),)) for name, x in tensors)
    return box_items(prefix, whole, placements, mesh)


def box_items(
    prefix: str,
    named_boxes: Iterable[tuple[str, Sequence[BoxView]]],
    placements: Mapping[str, Placement],
    mesh: Mesh,
) -> list[StateItem]:
    """Create items from boxes of this rank's local parameters, without padding and duplicate names."""
    items: dict[str, StateItem] = {}
    for name, views in named_boxes:
        local = local_box(placements[name], mesh.shape, mesh.coordinates)
        boxes = tuple(_to_global(views, local))
        items.setdefault(name, StateItem(f"{prefix}/{name}", tuple(placements[name].shape), boxes))
    return list(items.values())


def _to_global(views: Iterable[BoxView], local: Box) -> Iterator[BoxView]:
    """Convert boxes of the local parameter to boxes of the global parameter, without padding."""
    for box, tensor in views:
        ends = zip(box.offset, box.size, local.size, strict=True)
        size = tuple(max(0, min(start + length, limit) - start) for start, length, limit in ends)
        if prod(size) or not prod(box.size):
            offset = tuple(first + start for first, start in zip(local.offset, box.offset, strict=True))
            yield Box(offset, size), tensor[tuple(slice(length) for length in size)]


def model_items(stages: Sequence[nn.Module], mesh: Mesh) -> list[StateItem]:
    """Return the weights and persistent buffers of this rank's stages, under ``model/…``."""
    named = [pair for stage in stages for pair in stage.named_parameters()]
    return [*items_of("model", named, stage_placements(stages), mesh), *buffer_items(stages, mesh)]


def buffer_items(stages: Sequence[nn.Module], mesh: Mesh) -> list[StateItem]:
    """Return the persistent buffers of this rank's stages, under ``model/…``; a save compares their replicas."""
    named = [pair for stage in stages for pair in persistent_buffers(stage).items()]
    placements = {name: place for stage in stages for name, place in buffer_placements_of(stage).items()}
    coordinates = describe_coordinates(mesh.coordinates)
    return [replace(item, replica=coordinates) for item in items_of("model", named, placements, mesh)]


def optimizer_items(
    states: Mapping[str, Mapping[str, Sequence[BoxView]]], placements: Mapping[str, Placement], mesh: Mesh
) -> list[StateItem]:
    """Return the boxes ``states[kind][name]`` of moments and main parameters as items, under ``optim/<kind>/…``."""
    return [
        item for kind, named in states.items() for item in box_items(f"optim/{kind}", named.items(), placements, mesh)
    ]


def gather_items(items: Sequence[StateItem], mesh: Mesh) -> dict[str, Tensor]:
    """Gather the global tensor of each item by name to every rank; called on all ranks of the mesh.

    Intended for small models: every rank sends its boxes to every other rank.
    """
    local = [(item.name, item.shape, box, view.detach().cpu().clone()) for item in items for box, view in item.boxes]
    whole: dict[str, Tensor] = {}
    for name, shape, box, values in (entry for rank in all_gather_objects(local, mesh.world) for entry in rank):
        whole.setdefault(name, torch.zeros(shape, dtype=values.dtype))[box.slices] = values
    return whole


def write_dump(path: Path, items: Sequence[StateItem], mesh: Mesh) -> None:
    """Write the global tensors of all items to one safetensors file, for comparing runs on different layouts.

    The first rank writes; called on all ranks of the mesh.
    """
    whole = gather_items(items, mesh)
    if mesh.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: x.contiguous() for name, x in sorted(whole.items())}, path)
