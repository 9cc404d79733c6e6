"""One flat bucket, the local shard of it that this rank updates, and the all-gathers of ZeRO-1.

A bucket holds parameters that are reduced and updated together. Without ZeRO a rank updates the whole bucket. Under
ZeRO-1 (Rajbhandari et al. 2020) each rank of a shard group updates one shard and holds main parameters and moments for
that shard only. A reduce-scatter leaves each rank the sum of its shard, and after the update an all-gather restores the
parameters. Shards ignore parameter boundaries: one shard may hold the end of a parameter and the start of the next. Its
content is therefore described by boxes of the parameters, each contiguous in the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from megastack.comm.collectives import (
    Pending,
    own_piece,
    start_all_gather_,
    start_all_reduce_,
    start_reduce_scatter_,
)
from megastack.comm.group import AxisGroup
from megastack.gradients.bucket_spec import BucketSpec, ParameterSlot
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import Reduction
from megastack.placement.boxes import Box, range_boxes
from megastack.placement.module import BoxView


class Bucket:
    """The flat buffers of parameters that are reduced and updated together.

    Attributes:
        parameters: the flat parameters; the modules' own parameters are views of this buffer.
        gradients: the flat gradients, at the same offsets.
        local_parameters, local_gradients: the shards that this rank updates, as views.
        slots: name, shape and offset of each parameter.
        reduction: the groups over which the gradients are summed.
        group: the optimizer group; ``None`` if none was given.
        decay: whether the placements allow weight decay (``group`` takes precedence).
        reduce_dtype: the dtype in which gradients are summed over the data group.
    """

    def __init__(self, spec: BucketSpec, gradient_dtype: torch.dtype, reduce_dtype: torch.dtype | None = None) -> None:
        self.slots: tuple[ParameterSlot, ...] = spec.slots
        self.reduction: Reduction = spec.key.reduction
        self.group: ParameterGroup | None = spec.key.group
        self.decay: bool = spec.key.decay
        self.reduce_dtype = reduce_dtype or gradient_dtype
        device = spec.slots[0].parameters[0].device
        self.parameters = torch.zeros(spec.numel, dtype=spec.key.dtype, device=device)
        self.gradients = torch.zeros(spec.numel, dtype=gradient_dtype, device=device)
        self.local_parameters = own_piece(self.parameters, self.reduction.data.shard)
        self.local_gradients = own_piece(self.gradients, self.reduction.data.shard)
        for slot in self.slots:
            _move_into(slot, self.parameters)

    @property
    def is_rounded(self) -> bool:
        """Always false: modules compute with these values directly."""
        return False

    @property
    def is_sharded(self) -> bool:
        """Whether the local shard is smaller than the bucket."""
        return self.reduction.data.is_sharded

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's part of a flat buffer of this bucket's layout, by global name."""
        return ((slot.name, slot.view(flat)) for slot in self.slots)

    def parts(self, local: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """The boxes of each parameter, by global name, in a flat tensor of the local shard's layout; may be empty."""
        start = self.reduction.data.shard.rank * local.numel()
        return ((slot.name, tuple(_boxes(slot, local, start))) for slot in self.slots)

    def start_reduction(self) -> Pending:
        """Start the sum over the data group (or a shard group); after the wait it is in :attr:`local_gradients`."""
        data = self.reduction.data
        if not data.is_sharded:
            return self._start_sum(data.replicas)
        if self.reduce_dtype == self.gradients.dtype:
            return start_reduce_scatter_(self.gradients, data.shard)
        summing = start_reduce_scatter_(self.gradients.to(self.reduce_dtype), data.shard)
        return summing.then(self.local_gradients.copy_)

    def start_replica_sum(self) -> Pending:
        """Start the sum of the shards over their replicas, which a reduce-scatter does not include."""
        return self._start_sum(self.reduction.data.replicas)

    def start_gather(self) -> Pending:
        """Start to gather the parameters from the shards of all ranks of the shard group."""
        return start_all_gather_(self.parameters, self.reduction.data.shard)

    def _start_sum(self, group: AxisGroup) -> Pending:
        if self.reduce_dtype == self.gradients.dtype or group.size == 1:
            return start_all_reduce_(self.local_gradients, group)
        return start_all_reduce_(self.local_gradients.to(self.reduce_dtype), group).then(self.local_gradients.copy_)


def _boxes(slot: ParameterSlot, local: Tensor, start: int) -> Iterator[BoxView]:
    """The boxes of one parameter in the shard ``local`` that begins at ``start`` of its bucket."""
    if not slot.numel:
        yield Box((0,) * len(slot.shape), slot.shape), local[:0].view(slot.shape)
        return
    first = max(slot.offset, start)
    last = min(slot.offset + slot.numel, start + local.numel())
    if first >= last:
        return
    at = first - start
    for box in range_boxes(slot.shape, first - slot.offset, last - slot.offset):
        size = prod(box.size)
        yield box, local[at : at + size].view(box.size)
        at += size


@torch.no_grad()
def _move_into(slot: ParameterSlot, flat: Tensor) -> None:
    """Move the values of a parameter into the flat buffer and make its tensors views of it."""
    view = slot.view(flat)
    view.copy_(slot.parameters[0])
    for parameter in slot.parameters:
        parameter.data = view


class ParameterGathers:
    """The all-gathers of sharded buckets, which overlap with the next forward, and the hooks that wait for them.

    They start right after the update, in the order in which a forward uses the parameters. The forward of a stage waits
    for the parameters that the stage may use directly. A unit, a module that is used only by calling it (a block),
    waits for its own parameters when it is called. Without units a stage waits for all its parameters.

    Args:
        buckets: all buckets of the rank; buckets that are not sharded are skipped.
        modules: this rank's stages in order.
        units: their sub-modules that are used only by calling them, in order of use.
    """

    def __init__(self, buckets: Sequence[Bucket], modules: Sequence[nn.Module], units: Sequence[nn.Module]) -> None:
        self._buckets = buckets
        self._pending: dict[int, Pending] = {}
        self._order: list[int] = []
        if not any(bucket.is_sharded for bucket in buckets):
            return
        number_of = {p: at for at, bucket in enumerate(buckets) for slot in bucket.slots for p in slot.parameters}
        in_units = {parameter for unit in units for parameter in unit.parameters()}
        direct = [[p for p in module.parameters() if p not in in_units] for module in modules]
        held = [*direct, *([*unit.parameters()] for unit in units)]
        needed = [list(dict.fromkeys(number_of[p] for p in each if p in number_of)) for each in held]
        self._order = list(dict.fromkeys(number for numbers in needed for number in numbers))
        for module, numbers in zip([*modules, *units], needed, strict=True):
            module.register_forward_pre_hook(partial(self._before_use, numbers))

    def start(self) -> None:
        """Start all gathers, after every shard was updated."""
        assert not self._pending, "parameters are gathered once per update"
        for number in self._order:
            if self._buckets[number].is_sharded:
                self._pending[number] = self._buckets[number].start_gather()

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Wait for the gathers of these buckets, or of all."""
        for number in list(self._pending) if numbers is None else numbers:
            pending = self._pending.pop(number, None)
            if pending is not None:
                pending.wait()

    def _before_use(self, numbers: Sequence[int], module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._pending:
            self.wait(numbers)
