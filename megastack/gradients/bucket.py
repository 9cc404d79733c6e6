"""One flat bucket: the buffers of parameters that are reduced and updated alike, and the slice that is this rank's.

A rank updates its *own* slice of a bucket and keeps masters and moments for it alone. Without ZeRO the slice is the
whole bucket. A slice knows nothing of where parameters begin: it may hold the end of one and the start of the next, so
what lies in it is described by **parts**, boxes of a parameter each contiguous in the slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from megastack.comm.collectives import (
    Pending,
    own_piece,
    start_all_gather_,
    start_all_reduce_,
    start_reduce_scatter_,
)
from megastack.comm.group import AxisGroup
from megastack.gradients.bucket_spec import BucketSpec, ParameterSlot
from megastack.gradients.interface import BoxView
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import Reduction
from megastack.placement.boxes import Box, range_boxes


class Bucket:
    """The flat buffers of parameters that are reduced and updated alike.

    Attributes:
        parameters: the parameters, flat; the modules' own are views of it.
        gradients: their gradients, flat, with the same offsets.
        own_parameters, own_gradients: the slices that this rank updates, views.
        entries: name, shape and offset of each parameter.
        reduction: the groups over which the gradients are summed.
        group: the optimizer group, ``None`` if none was given.
        decay: whether the placements let weight decay apply (``group`` decides where it is given).
        travel_dtype: the dtype in which gradients are summed over data ranks.
    """

    def __init__(self, plan: BucketSpec, gradient_dtype: torch.dtype, travel_dtype: torch.dtype | None = None) -> None:
        self.entries: tuple[ParameterSlot, ...] = plan.entries
        self.reduction: Reduction = plan.kind.reduction
        self.group: ParameterGroup | None = plan.kind.group
        self.decay: bool = plan.kind.decay
        self.travel_dtype = travel_dtype or gradient_dtype
        device = plan.entries[0].parameters[0].device
        self.parameters = torch.zeros(plan.numel, dtype=plan.kind.dtype, device=device)
        self.gradients = torch.zeros(plan.numel, dtype=gradient_dtype, device=device)
        self.local_parameters = own_piece(self.parameters, self.reduction.data.shard)
        self.local_gradients = own_piece(self.gradients, self.reduction.data.shard)
        for entry in self.entries:
            _adopt(entry, self.parameters)

    @property
    def is_owner(self) -> bool:
        """Whether this rank's slice counts in the norm."""
        return self.reduction.is_owner and self.reduction.data.is_owner

    @property
    def is_rounded(self) -> bool:
        """Modules compute with these very values."""
        return False

    @property
    def is_shared(self) -> bool:
        """Whether this rank's slice is less than the bucket."""
        return self.reduction.data.shard.size > 1

    @property
    def gradient_bytes(self) -> int:
        """The size of what is reduced."""
        return self.gradients.numel() * self.travel_dtype.itemsize

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's part of a flat buffer of this bucket's layout, by global name."""
        return ((entry.name, entry.view(flat)) for entry in self.entries)

    def parts(self, own: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """What a tensor of the own slice's layout holds of each parameter, by global name; nothing of some."""
        start = self.reduction.data.shard.rank * own.numel()
        return ((entry.name, tuple(_parts(entry, own, start))) for entry in self.entries)

    def start_reduction(self) -> Pending:
        """Begin the sum over data ranks; its result lies in :attr:`local_gradients` once it was waited for."""
        data = self.reduction.data
        if data.shard.size == 1:
            return self._sum_over(data.replicas)
        if self.travel_dtype == self.gradients.dtype:
            return start_reduce_scatter_(self.gradients, data.shard)
        summing = start_reduce_scatter_(self.gradients.to(self.travel_dtype), data.shard)
        return summing.then(self.local_gradients.copy_)

    def start_replica_sum(self) -> Pending:
        """Begin what a reduce-scatter leaves to do: the sum of the slices over shard groups."""
        return self._sum_over(self.reduction.data.replicas)

    def start_gather(self) -> Pending:
        """Begin to fill the parameters with the slices of all ranks that share them."""
        return start_all_gather_(self.parameters, self.reduction.data.shard)

    def _sum_over(self, group: AxisGroup) -> Pending:
        if self.travel_dtype == self.gradients.dtype or group.size == 1:
            return start_all_reduce_(self.local_gradients, group)
        return start_all_reduce_(self.local_gradients.to(self.travel_dtype), group).then(self.local_gradients.copy_)


def _parts(entry: ParameterSlot, own: Tensor, start: int) -> Iterator[BoxView]:
    """The parts of one parameter in the slice ``own`` that begins at ``start`` of its bucket."""
    if not entry.numel:
        yield Box((0,) * len(entry.shape), entry.shape), own[:0].view(entry.shape)
        return
    first = max(entry.offset, start)
    last = min(entry.offset + entry.numel, start + own.numel())
    if first >= last:
        return
    at = first - start
    for box in range_boxes(entry.shape, first - entry.offset, last - entry.offset):
        size = prod(box.size)
        yield box, own[at : at + size].view(box.size)
        at += size


@torch.no_grad()
def _adopt(entry: ParameterSlot, flat: Tensor) -> None:
    """Move the values of a parameter into the flat buffer and make its tensors views of it."""
    view = entry.view(flat)
    view.copy_(entry.parameters[0])
    for parameter in entry.parameters:
        parameter.data = view
