"""One parameter cut over data ranks: the shard that is this rank's, as a slice to update.

A parameter is cut into equal parts of one dim over the ranks of a shard group, inside of what tensor parallelism left
of it: the shard is a box of the local parameter, contiguous in memory. :func:`shard_dim` says which dim is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from megastack.comm.collectives import all_gather, start_all_reduce_
from megastack.comm.group import AxisGroup
from megastack.gradients.interface import BoxView
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import Reduction
from megastack.placement.boxes import Box


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dim that is cut: the first if its size is a multiple of the ranks, since then nothing is copied to join the
    parts; else the last that is; else the first, whose last parts are smaller and padded on the wire."""
    even = [dim for dim, size in enumerate(shape) if size % ranks == 0]
    return 0 if not even or even[0] == 0 else even[-1]


class ParameterShard:
    """This rank's shard of a parameter.

    Args:
        name: the global name.
        shape: the local parameter, whole.
        dim: the dim that is cut.
        local: the values of the shard, contiguous.
        reduction: how its gradient is summed.
        compute: the dtype in which modules use it.
        group: the optimizer group, ``None`` if none was given.
        decay: whether weight decay applies.

    Attributes:
        gradient: set when a step is finished.
        rounded: the shard in the dtype of ``compute``, while somebody reads or writes it as such.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dim: int,
        local: Tensor,
        reduction: Reduction,
        *,
        compute: torch.dtype,
        group: ParameterGroup | None = None,
        decay: bool = True,
    ) -> None:
        self.name, self.shape, self.dim, self.local = name, tuple(shape), dim, local
        self.reduction, self.group, self.decay = reduction, group, decay
        self.compute = compute
        self.gradient: Tensor | None = None
        self.rounded: Tensor | None = None

    @property
    def local_parameters(self) -> Tensor:
        """The values, flat."""
        return self.local.view(-1)

    @property
    def as_used(self) -> Tensor:
        """The values as modules use them, flat: a copy in ``rounded``, or the values themselves."""
        return self.local_parameters if self.rounded is None else self.rounded.view(-1)

    @property
    def local_gradients(self) -> Tensor:
        """The gradient, flat."""
        assert self.gradient is not None, f"{self.name}: its gradient is there after finish()"
        return self.gradient.view(-1)

    @property
    def is_rounded(self) -> bool:
        """Whether modules use it in a lower precision."""
        return self.local.dtype != self.compute

    @property
    def is_owner(self) -> bool:
        """Whether this rank's shard counts in the norm."""
        return self.reduction.is_owner and self.reduction.data.is_owner

    @property
    def box(self) -> Box:
        """Where the shard lies in the local parameter."""
        if self.is_empty:
            return Box((0,) * len(self.shape), self.shape)
        start = min(self._length * self.reduction.data.shard.rank, self.shape[self.dim])
        offset = tuple(start if dim == self.dim else 0 for dim in range(len(self.shape)))
        return Box(offset, tuple(self.local.shape))

    @property
    def is_empty(self) -> bool:
        """Whether the parameter has no elements; every rank holds the whole of it then."""
        return not prod(self.shape)

    @property
    def _length(self) -> int:
        """The size of the largest shard in the dim that is cut."""
        return -(-self.shape[self.dim] // self.reduction.data.shard.size)

    def parts(self, own: Tensor) -> Iterator[tuple[str, tuple[BoxView, ...]]]:
        """The one box that a tensor like the shard holds; none where others hold all of the elements."""
        box = self.box
        yield self.name, ((box, own.view(box.size)),) if box.numel or self.is_empty else ()

    def whole(self, own: Tensor) -> Tensor:
        """The local parameter's shape put together from a tensor like the shard on each rank of the shard group."""
        if self.is_empty:
            return own.view(self.shape)
        group: AxisGroup = self.reduction.data.shard
        padded = own.new_zeros([self._length if dim == self.dim else size for dim, size in enumerate(self.shape)])
        padded.narrow(self.dim, 0, self.local.shape[self.dim]).copy_(own.view(self.local.shape))
        return torch.narrow(all_gather(padded, group, self.dim), self.dim, 0, self.shape[self.dim])


def sum_over(group_of: Callable[[ParameterShard], AxisGroup | None], shards: Sequence[ParameterShard]) -> None:
    """Sum gradients over the group of each, those of one group and dtype in one operation."""
    together: dict[tuple[AxisGroup, torch.dtype], list[Tensor]] = {}
    for shard in shards:
        group = group_of(shard)
        if group is not None and group.size > 1 and shard.local_gradients.numel():
            together.setdefault((group, shard.local_gradients.dtype), []).append(shard.local_gradients)
    sums = [(own, start_all_reduce_(torch.cat(own), group)) for (group, _), own in together.items()]
    for own, pending in sums:
        for gradient, total in zip(own, pending.wait().split([x.numel() for x in own]), strict=True):
            gradient.copy_(total)
