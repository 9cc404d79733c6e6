"""The state of a run as items: parameters, buffers, moments and gradients of this rank, by global name and box."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from torch import Tensor, nn

from megastack.checkpoint.items import StateItem
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import describe_coordinates
from megastack.placement.boxes import Box, local_box
from megastack.placement.buffers import persistent_buffers
from megastack.placement.module import buffer_placements_of, placements_of
from megastack.placement.placement import Placement

BoxView = tuple[Box, Tensor]
"""A box of the local parameter and the tensor with its elements."""


def stage_placements(stages: Sequence[nn.Module]) -> dict[str, Placement]:
    """The placement of every parameter of this rank by global name."""
    return {name: placement for stage in stages for name, placement in placements_of(stage).items()}


def items_of(
    prefix: str, tensors: Iterable[tuple[str, Tensor]], placements: Mapping[str, Placement], mesh: Mesh
) -> list[StateItem]:
    """One item for each named tensor that is laid out like its parameter; padding is left out, a name comes once."""
    whole = ((name, ((Box((0,) * x.dim(), tuple(x.shape)), x.detach()),)) for name, x in tensors)
    return part_items(prefix, whole, placements, mesh)


def part_items(
    prefix: str,
    named_parts: Iterable[tuple[str, Sequence[BoxView]]],
    placements: Mapping[str, Placement],
    mesh: Mesh,
) -> list[StateItem]:
    """One item for each name, from boxes of this rank's part of the parameter; padding is left out."""
    items: dict[str, StateItem] = {}
    for name, parts in named_parts:
        here = local_box(placements[name], mesh.shape, mesh.coordinates)
        boxes = tuple(_logical(parts, here))
        items.setdefault(name, StateItem(f"{prefix}/{name}", tuple(placements[name].shape), boxes))
    return list(items.values())


def _logical(parts: Iterable[BoxView], here: Box) -> Iterator[BoxView]:
    """Boxes of the local parameter as boxes of the global one, without what is padding."""
    for box, tensor in parts:
        ends = zip(box.offset, box.size, here.size, strict=True)
        size = tuple(max(0, min(start + length, limit) - start) for start, length, limit in ends)
        if prod(size) or not prod(box.size):
            offset = tuple(first + start for first, start in zip(here.offset, box.offset, strict=True))
            yield Box(offset, size), tensor[tuple(slice(length) for length in size)]


def model_items(stages: Sequence[nn.Module], mesh: Mesh) -> list[StateItem]:
    """The weights and persistent buffers of this rank's stages, under ``model/…``."""
    named = [pair for stage in stages for pair in stage.named_parameters()]
    return [*items_of("model", named, stage_placements(stages), mesh), *buffer_items(stages, mesh)]


def buffer_items(stages: Sequence[nn.Module], mesh: Mesh) -> list[StateItem]:
    """The persistent buffers of this rank's stages, under ``model/…``; ranks that hold the same are compared."""
    named = [pair for stage in stages for pair in persistent_buffers(stage).items()]
    placements = {name: place for stage in stages for name, place in buffer_placements_of(stage).items()}
    here = describe_coordinates(mesh.coordinates)
    return [replace(item, replica=here) for item in items_of("model", named, placements, mesh)]


def optimizer_items(
    kinds: Mapping[str, Mapping[str, Sequence[BoxView]]], placements: Mapping[str, Placement], mesh: Mesh
) -> list[StateItem]:
    """The optimizer's moments and masters, ``kinds[kind][name]`` as boxes, under ``optim/<kind>/…``."""
    return [
        item for kind, named in kinds.items() for item in part_items(f"optim/{kind}", named.items(), placements, mesh)
    ]
