"""Which groups a mesh has, and the memory that each of their ranks shares if it can."""

from __future__ import annotations

from megastack.comm.shared_memory.plan import RING_BYTES, SMALL_RING_BYTES, GroupPlan, message_bytes
from megastack.mesh.shape import DENSE_AXES, Axis, MeshShape

FUSED_AXES = ((Axis.DP, Axis.CP), (Axis.PP, Axis.TP), (Axis.PP, Axis.DP, Axis.CP), DENSE_AXES)
"""The fused axes for which training needs groups."""


def grouped_axes(shape: MeshShape) -> list[tuple[Axis, ...]]:
    """The axes along which a mesh has groups, without those of size 1, single ones first."""
    single = [(axis,) for axis in DENSE_AXES]
    real = [
        tuple(axis for axis in DENSE_AXES if axis in named and shape.size(axis) > 1)
        for named in (*single, *FUSED_AXES, DENSE_AXES)
    ]
    return [axes for axes in dict.fromkeys(real) if axes]


def group_plans(shape: MeshShape, rank: int) -> list[GroupPlan]:
    """The groups of a rank along each of :func:`grouped_axes`; those along several axes carry small tensors only."""
    plans = []
    for axes in grouped_axes(shape):
        ranks = next(tuple(members) for members in shape.groups(*axes) if rank in members)
        messages = message_bytes(len(ranks) - 1) if axes == (Axis.PP,) else 0
        ring = RING_BYTES if len(axes) == 1 else SMALL_RING_BYTES
        plans.append(GroupPlan("_".join(axes), ranks, ring, messages))
    return plans
