"""On which ranks a parameter is replicated, over which its gradient is partial, and who owns a replica.

:func:`replication_of` answers these questions for one parameter on one rank, from its placement, the degrees of the
mesh and the rank's coordinates. Gradient buckets, ZeRO, FSDP and the gradient norm read this value and know no axis by
name. The value is pure: it holds axes and coordinates; the process groups are opened by ``megastack.gradients``.

==========================================  ===========================================  ==============================
parameter                                   gradient summed over the data group, then    owner of the replica
==========================================  ===========================================  ==============================
sharded over tp                             -                                            every rank
sharded over tp, with copies                the ``tp`` ranks that hold the same shard    copy 0
replicated over tp, full gradient           -                                            tp coordinate 0
replicated over tp, partial gradient        ``tp``                                       tp coordinate 0
tied: one name on several pipeline stages   ... and then these stages (``pp``)           ... of the first of them
==========================================  ===========================================  ==============================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.placement import DATA_AXES, Placement


@dataclass(frozen=True)
class Subgroup:
    """Some ranks of this rank's group along a mesh axis.

    Attributes:
        axis: the mesh axis.
        indices: their coordinates on it, in order.
    """

    axis: Axis
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Replication:
    """How one parameter is replicated, as one rank sees it.

    Attributes:
        data_axes: the mesh axes of its data group. Its ranks hold identical elements, every gradient is partial over
            it, and ZeRO shards the parameter among its ranks.
        partial_over: the groups over which the gradient is partial besides, in the order in which it is summed.
        sharded_over: the axes that shard it.
        owns_replica: whether this rank's elements represent those of its replicas on the other axes. The data group is
            left out: there the owner depends on how ZeRO shards the parameter.
    """

    data_axes: tuple[Axis, ...]
    partial_over: tuple[Subgroup, ...]
    sharded_over: tuple[Axis, ...]
    owns_replica: bool


def is_replicated_over_data(placement: Placement, mesh_shape: MeshShape) -> bool:
    """Whether ranks that differ only in dp and cp hold identical elements, as long as ZeRO does not shard them."""
    return all(mesh_shape.size(axis) == 1 or axis in placement.data_axes for axis in DATA_AXES)


def replication_of(
    placement: Placement, mesh_shape: MeshShape, coordinates: Mapping[Axis, int], *, stages: Sequence[int] = ()
) -> Replication:
    """The replication of a parameter on the rank at ``coordinates``.

    Args:
        placement: the parameter's placement.
        mesh_shape: the degrees of the mesh.
        coordinates: the rank's coordinates.
        stages: the pipeline coordinates that hold the same tied parameter; empty if it is not tied.
    """
    replicas = tuple(_replicas(placement, mesh_shape, coordinates))
    partial = tuple(group for group in replicas if group.axis in placement.partial | placement.shards.keys())
    tied = (Subgroup(Axis.PP, tuple(stages)),) if len(stages) > 1 else ()
    return Replication(
        data_axes=placement.data_axes,
        partial_over=partial + tied,
        sharded_over=tuple(a for a in placement.model_axes if a in placement.shards and mesh_shape.size(a) > 1),
        owns_replica=all(coordinates[group.axis] == group.indices[0] for group in replicas + tied),
    )


def _replicas(placement: Placement, mesh_shape: MeshShape, coordinates: Mapping[Axis, int]) -> Iterator[Subgroup]:
    """The ranks of each model axis that hold the same elements as this one, where there are several."""
    for axis in placement.model_axes:
        shard = placement.shards.get(axis)
        copies = mesh_shape.size(axis) if shard is None else shard.copies
        if mesh_shape.size(axis) > 1 and copies > 1:
            first = coordinates[axis] // copies * copies
            yield Subgroup(axis, tuple(range(first, first + copies)))
