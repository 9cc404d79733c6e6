"""A parameter as a value: its global shape, its shards, where its gradient is partial, its initial values.

A :class:`Placement` is the one source of truth for a parameter. Initial values, gradient reductions, the owner of a
replica in the gradient norm, checkpoint boxes and memory estimates follow from it alone. It holds no tensor and needs
no process group, so it can be printed, compared and used for planning. ``megastack.placement.boxes`` computes which
part of the parameter a rank holds, ``megastack.placement.replication`` which ranks hold the same part.

A placement does not name the data-parallel and context axes: every parameter is replicated over them and every gradient
is partial over them. The pipeline axis only decides which rank has a module.

Example: the query projection of 32 heads of 128 over a hidden size of 4096, its heads sharded over the tensor axis::

    Placement(shape=(32, 128, 4096), shards={Axis.TP: Shard(0)}, init=Normal(0.02))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import TypeAlias

from megastack.errors import PlacementError, counted
from megastack.mesh.shape import Axis

DATA_AXES = (Axis.DP, Axis.CP)
"""The data-parallel axes; without ZeRO their ranks hold identical parameters."""
SHARD_AXES = (Axis.TP, Axis.EP)
"""The axes that a placement may name, as sharding the parameter or as making its gradient partial."""


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
            0 is the owner in norms.
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
    """Where the elements of one parameter live on the mesh, and their initial values.

    Args:
        shape: the logical global shape, used by counts, initial values and checkpoints.
        shards: how each axis shards the tensor; it is replicated over an absent axis.
        partial: the axes over which the gradient is partial, as for a replicated parameter that is applied to a tensor
            split over the axis.
        init: the initial values.
        decay: whether weight decay applies unless the optimizer options exclude the parameter.
        padded_shape: the shape that the ranks allocate together where it exceeds ``shape`` (vocabulary rows). Padded
            elements come last in their dim, are zero, and are in no norm, count or checkpoint.

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
        """The axes of a stage beside the data group: each shards the parameter or holds replicas of it."""
        return (Axis.TP,)

    @property
    def allocated_shape(self) -> tuple[int, ...]:
        """The global shape with padding, which the ranks allocate together."""
        return self.shape if self.padded_shape is None else self.padded_shape

    @property
    def numel(self) -> int:
        """The number of logical elements."""
        return prod(self.shape)


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
        f"shards axis {axis}: only {legal} cut a parameter; over the other axes it is whole"
        for axis in placement.shards
        if axis not in SHARD_AXES
    ]
    dims = len(placement.shape)
    errors += [
        f"shards[{axis}]={shard}: shape={placement.shape} has {counted(dims, 'dim')}; "
        + (f"use dim 0 to {dims - 1}" if dims else "leave it whole")
        for axis, shard in placement.shards.items()
        if shard.dim >= dims
    ]
    cut = [shard.dim for shard in placement.shards.values()]
    if len(set(cut)) < len(cut):
        errors.append(f"shards={dict(placement.shards)}: two axes cut the same dim; give each axis its own dim")
    return errors


def _partial_errors(placement: Placement) -> list[str]:
    errors = [
        f"partial axis {axis}: every gradient is summed over dp and cp already; declare only {', '.join(SHARD_AXES)}"
        for axis in sorted(placement.partial)
        if axis not in SHARD_AXES
    ]
    errors += [
        f"partial axis {axis}: the axis also cuts the parameter, so each rank has other elements; drop one of the two"
        for axis in sorted(placement.partial & placement.shards.keys())
    ]
    return errors
