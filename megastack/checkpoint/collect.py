"""The state of a run as items: parameters, moments and gradients of this rank under their global names and boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from megastack.checkpoint.items import StateItem
from megastack.mesh.mesh import Mesh
from megastack.placement.boxes import local_box
from megastack.placement.module import placements_of
from megastack.placement.placement import Placement


def stage_placements(stages: Sequence[nn.Module]) -> dict[str, Placement]:
    """The placement of every parameter of this rank by global name."""
    return {name: placement for stage in stages for name, placement in placements_of(stage).items()}


def items_of(
    prefix: str, tensors: Iterable[tuple[str, Tensor]], placements: Mapping[str, Placement], mesh: Mesh
) -> list[StateItem]:
    """One item for each named tensor that is laid out like its parameter; padding is left out, a name comes once."""
    items: dict[str, StateItem] = {}
    for name, tensor in tensors:
        box = local_box(placements[name], mesh.shape, mesh.coordinates)
        logical = tensor.detach()[tuple(slice(size) for size in box.size)]
        item = StateItem(f"{prefix}/{name}", tuple(placements[name].shape), ((box, logical),))
        items.setdefault(item.name, item)
    return list(items.values())


def model_items(stages: Sequence[nn.Module], mesh: Mesh) -> list[StateItem]:
    """The weights of this rank's stages, under ``model/…``."""
    named = [pair for stage in stages for pair in stage.named_parameters()]
    return items_of("model", named, stage_placements(stages), mesh)


def moment_items(
    moments: Mapping[str, Mapping[str, Tensor]], placements: Mapping[str, Placement], mesh: Mesh
) -> list[StateItem]:
    """The optimizer's moments, ``moments[kind][name]``, under ``optim/<kind>/…``."""
    return [
        item for kind, named in moments.items() for item in items_of(f"optim/{kind}", named.items(), placements, mesh)
    ]
