"""A parameter as a value: its global shape, its shards, the axes of its partial gradient, its initial values.

A :class:`Placement` is the single source of truth for a parameter. Initial values, gradient reductions, the owner of a
replica in the gradient norm, checkpoint boxes and memory estimates follow from it alone. It holds no tensor and needs
no process group, so it can be printed, compared and used for planning. ``megastack.placement.boxes`` computes which
part of the parameter a rank holds, and :func:`replication_of` computes which ranks hold the same part.

A placement does not name the data-parallel and context axes: every parameter is replicated over them, and every
gradient is partial over them. The pipeline axis only decides which rank has a module.

Example: the query projection of 32 heads of 128 over a hidden size of 4096, its heads sharded over the tensor axis::

    Placement(shape=(32, 128, 4096), shards={Axis.TP: Shard(0)}, init=Normal(0.02))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import TypeAlias

from megastack.errors import PlacementError, counted
from megastack.mesh.shape import Axis, MeshShape

DATA_AXES = (Axis.DP, Axis.CP)
"""The data-parallel axes; without ZeRO their ranks hold identical parameters."""
SHARD_AXES = (Axis.TP, Axis.EP)
"""The axes that a placement may name, because they shard the parameter or its gradient is partial over them."""


@dataclass(frozen=True)
class Normal:
    """Normal initial values of mean zero and standard deviation ``std``, a function of the global index."""

    std: float

    def __post_init__(self) -> None:
        if not isfinite(self.std) or self.std < 0:
            raise PlacementError(f"Normal std={self.std}: must be finite and not negative; use 0.02, or Zeros()")


@dataclass(frozen=True)
class Zeros:
    """Initial values of zero."""


@dataclass(frozen=True)
class Ones:
    """Initial values of one."""


Initialiser: TypeAlias = Normal | Zeros | Ones


@dataclass(frozen=True)
class Shard:
    """One tensor dim split into equal contiguous shards over a mesh axis.

    Args:
        dim: the tensor dim, counted from 0.
        copies: the number of adjacent ranks of the axis that hold the same shard. Their gradients are summed, and copy
            0 is the owner in the norm.
    """

    dim: int
    copies: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise PlacementError(f"Shard dim={self.dim}: dims count from 0; use a dim that is not negative")
        if self.copies < 1:
            raise PlacementError(f"Shard copies={self.copies}: must be at least 1; use 1 for no copies")


@dataclass(frozen=True)
class Placement:
    """The location of a parameter's elements on the mesh, and their initial values.

    Args:
        shape: the logical global shape, used by counts, initial values and checkpoints.
        shards: how each axis shards the tensor; it is replicated over any other axis.
        partial: the axes over which the gradient is partial, as for a replicated parameter that is applied to a tensor
            split over the axis.
        init: the initial values.
        decay: whether weight decay applies unless the optimizer options exclude the parameter.
        padded_shape: the shape that the ranks allocate together if it exceeds ``shape`` (vocabulary rows). Padded
            elements come last in their dim and are zero. Norms, counts and checkpoints exclude them.

    Raises:
        PlacementError: the arguments do not fit each other; the message lists every error.
    """

    shape: tuple[int, ...]
    shards: Mapping[Axis, Shard] = field(default_factory=dict, hash=False)
    partial: frozenset[Axis] = frozenset()
    init: Initialiser = Normal(0.02)
    decay: bool = True
    padded_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "shape", tuple(self.shape))
        set_field(self, "shards", dict(self.shards))
        set_field(self, "partial", frozenset(self.partial))
        if self.padded_shape is not None:
            set_field(self, "padded_shape", tuple(self.padded_shape))
        if errors := [*_shape_errors(self), *_shard_errors(self), *_partial_errors(self)]:
            raise PlacementError("; ".join(errors))

    @property
    def data_axes(self) -> tuple[Axis, ...]:
        """The axes of the data group: its ranks hold identical elements, and every gradient is partial over it."""
        return DATA_AXES

    @property
    def model_axes(self) -> tuple[Axis, ...]:
        """The other axes of a stage: each shards the parameter or holds replicas of it."""
        return (Axis.TP,)

    @property
    def allocated_shape(self) -> tuple[int, ...]:
        """The global shape with padding, which the ranks allocate together."""
        return self.shape if self.padded_shape is None else self.padded_shape

    @property
    def numel(self) -> int:
        """The number of logical elements."""
        return prod(self.shape)


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
    """The replicas of a parameter, the ranks over which its gradient is partial, and the owner of a replica.

    Gradient buckets, ZeRO, FSDP and the gradient norm read this value of each parameter and refer to no axis by name.
    It holds axes and coordinates; ``megastack.gradients.reduction`` opens the process groups.

    Attributes:
        data_axes: the mesh axes of its data group. Its ranks hold identical elements, every gradient is partial over
            it, and ZeRO shards the parameter among its ranks.
        partial_over: the other groups over which the gradient is partial, in the order in which it is summed.
        sharded_over: the axes that shard it.
        owns_replica: whether this rank owns its elements among the replicas on the other axes. The data group is
            excluded, since its owner depends on how ZeRO shards the parameter.
    """

    data_axes: tuple[Axis, ...]
    partial_over: tuple[Subgroup, ...]
    sharded_over: tuple[Axis, ...]
    owns_replica: bool


def is_replicated_over_data(placement: Placement, mesh_shape: MeshShape) -> bool:
    """Whether ranks that differ only in dp and cp hold identical elements, unless ZeRO shards them."""
    return all(mesh_shape.size(axis) == 1 or axis in placement.data_axes for axis in DATA_AXES)


def replication_of(
    placement: Placement, mesh_shape: MeshShape, coordinates: Mapping[Axis, int], *, stages: Sequence[int] = ()
) -> Replication:
    """The replication of a parameter on the rank at ``coordinates``.

    =======================================  ===========================================  =========================
    parameter                                gradient summed over the data group, then    owner of the replica
    =======================================  ===========================================  =========================
    sharded over tp                          -                                            every rank
    sharded over tp, with copies             the ``tp`` ranks that hold the same shard    copy 0
    replicated over tp, full gradient        -                                            tp coordinate 0
    replicated over tp, partial gradient     ``tp``                                       tp coordinate 0
    tied: one name on several stages         ... and then these stages (``pp``)           ... of the first of them
    =======================================  ===========================================  =========================

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
    """The ranks of each model axis that hold the same elements as this one, if there are several."""
    for axis in placement.model_axes:
        shard = placement.shards.get(axis)
        copies = mesh_shape.size(axis) if shard is None else shard.copies
        if mesh_shape.size(axis) > 1 and copies > 1:
            first = coordinates[axis] // copies * copies
            yield Subgroup(axis, tuple(range(first, first + copies)))


def _shape_errors(placement: Placement) -> list[str]:
    padded = placement.allocated_shape
    if any(size < 0 for size in placement.shape):
        return [f"shape={placement.shape}: sizes must not be negative"]
    if len(padded) != len(placement.shape) or any(a < b for a, b in zip(padded, placement.shape, strict=True)):
        return [f"padded_shape={padded}: must have the dims of shape={placement.shape}, none of them smaller"]
    return []


def _shard_errors(placement: Placement) -> list[str]:
    legal = ", ".join(SHARD_AXES)
    errors = [
        f"shards axis {axis}: only {legal} shard a parameter; it is replicated over the other axes"
        for axis in placement.shards
        if axis not in SHARD_AXES
    ]
    dims = len(placement.shape)
    errors += [
        f"shards[{axis}]={shard}: shape={placement.shape} has {counted(dims, 'dim')}; "
        + (f"use dim 0 to {dims - 1}" if dims else "do not shard it")
        for axis, shard in placement.shards.items()
        if shard.dim >= dims
    ]
    dims_used = [shard.dim for shard in placement.shards.values()]
    if len(set(dims_used)) < len(dims_used):
        errors.append(f"shards={dict(placement.shards)}: two axes shard the same dim; use another dim for each axis")
    return errors


def _partial_errors(placement: Placement) -> list[str]:
    errors = [
        f"partial axis {axis}: every gradient is summed over dp and cp already; declare only {', '.join(SHARD_AXES)}"
        for axis in sorted(placement.partial)
        if axis not in SHARD_AXES
    ]
    errors += [
        f"partial axis {axis}: the axis also shards the parameter, and its ranks hold different elements; use one"
        for axis in sorted(placement.partial & placement.shards.keys())
    ]
    return errors
