"""Initial values of one parameter, written into the part of it that a rank holds.

The values are a function of the seed, the parameter's global name and each element's global index, so every layout
starts from the same weights and no rank evaluates more than its own part. Padding is zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megastack.errors import PlacementError
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import local_box, local_shape
from megastack.placement.placement import Normal, Ones, Placement
from megastack.random import counter_normal


@torch.no_grad()
def fill_(
    tensor: Tensor,
    placement: Placement,
    mesh_shape: MeshShape,
    coordinates: Mapping[Axis, int],
    *,
    seed: int,
    name: str,
) -> None:
    """Fills the local tensor of a parameter with its initial values, in place; on the meta device does nothing.

    Args:
        tensor: the local tensor, of the shape that ``local_shape`` gives.
        placement: the parameter's placement.
        mesh_shape: the degrees of the mesh.
        coordinates: this rank's coordinates.
        seed: the run's seed.
        name: the parameter's global name.

    Raises:
        PlacementError: when the tensor does not have the local shape, as with another mesh than it was built for.
    """
    expected = local_shape(placement, mesh_shape)
    if tuple(tensor.shape) != expected:
        raise PlacementError(
            f"{name}: its local shape is {tuple(tensor.shape)}, but on {mesh_shape} it is {expected}; "
            "build the module on this mesh"
        )
    if tensor.is_meta:
        return
    box = local_box(placement, mesh_shape, coordinates)
    logical = tensor[tuple(slice(size) for size in box.size)]
    if logical.shape != tensor.shape:
        tensor.zero_()
    match placement.init:
        case Normal(std=std):
            values = counter_normal(seed, name, placement.shape, box, std=std, dtype=tensor.dtype, device=tensor.device)
            logical.copy_(values)
        case Ones():
            logical.fill_(1)
        case _:
            logical.zero_()
