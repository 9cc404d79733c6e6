"""The layout of flat buckets: which parameters share a bucket, and the offset of each.

The layout is planned once and is identical on all ranks that reduce together. Parameters are assigned in reverse order
of use (the last module's last parameter first), which is roughly the order in which a backward completes their
gradients. Parameters with the same dtype, reduction and optimizer group share buckets, and a bucket is closed at a
given size. Buckets are ordered by their last slot, so that the bucket that completes first comes first. Tied parameters
are ordered by name instead: the stages that share them use them in opposite orders but must agree on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from megastack.errors import PlacementError
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import NamedParameter, Reduction
from megastack.mesh.shape import Axis
from megastack.placement.placement import Placement

ALIGNMENT_BYTES = 16
"""Every parameter starts at a multiple of this, for vectorised kernels; common sizes need no padding."""


@dataclass(frozen=True)
class BucketKey:
    """The properties that all parameters of a bucket share.

    Attributes:
        dtype: the dtype of the parameters.
        reduction: how their gradients are reduced.
        group: the optimizer group; ``None`` for buckets without groups.
        decay: whether their placements allow weight decay; ``True`` if ``group`` decides.
    """

    dtype: torch.dtype
    reduction: Reduction
    group: ParameterGroup | None
    decay: bool


@dataclass(frozen=True)
class ParameterSlot:
    """One parameter of a bucket.

    Attributes:
        name: its global name.
        shape: its shape on this rank.
        offset: its first element in the bucket's flat buffers.
        parameters: the tensors of this name; several if more than one stage of this rank holds it.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    parameters: tuple[nn.Parameter, ...]

    @property
    def numel(self) -> int:
        """The number of elements on this rank."""
        return prod(self.shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a flat buffer of its bucket, in the parameter's shape."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class BucketSpec:
    """The content of one bucket: its key, its slots, and the total number of elements."""

    key: BucketKey
    slots: tuple[ParameterSlot, ...]
    numel: int


def make_bucket_specs(
    parameters: Iterable[NamedParameter],
    key_of: Callable[[str, nn.Parameter, Placement], BucketKey],
    *,
    gradient_dtype: Callable[[torch.dtype], torch.dtype],
    bucket_size: int,
) -> list[BucketSpec]:
    """Plan the buckets of one rank, in the order in which their reductions start.

    Args:
        parameters: trained parameters by global name, in reverse order of use; a name may occur more than once.
        key_of: returns the key of a parameter; parameters with equal keys may share a bucket.
        gradient_dtype: returns the dtype of the gradient of a parameter of a given dtype.
        bucket_size: the number of elements at which a bucket is closed; a larger parameter has its own bucket.
    """
    members_of: dict[BucketKey, list[tuple[int, list[NamedParameter]]]] = {}
    for place, same in enumerate(_by_name(parameters)):
        members_of.setdefault(key_of(*same[0]), []).append((place, same))
    found: list[tuple[int, BucketSpec]] = []
    for key, members in members_of.items():
        if key.reduction.group_over(Axis.PP) is not None:
            members.sort(key=lambda member: member[1][0][0])
        align = ALIGNMENT_BYTES // min(key.dtype.itemsize, gradient_dtype(key.dtype).itemsize)
        found.extend(_split(key, members, bucket_size, align))
    return [spec for _, spec in sorted(found, key=lambda pair: pair[0])]


def _by_name(parameters: Iterable[NamedParameter]) -> list[list[NamedParameter]]:
    """Group parameters by name, at the position of the last one: a name is complete only when all of them are."""
    names: dict[str, list[NamedParameter]] = {}
    for named in parameters:
        names[named[0]] = [*names.pop(named[0], []), named]
    for name, same in names.items():
        forms = {(tuple(parameter.shape), parameter.dtype, placement) for _, parameter, placement in same}
        if len(forms) > 1:
            raise PlacementError(f"{name}: stages of one rank hold it with different shapes, dtypes or placements")
    return list(names.values())


def _split(
    key: BucketKey, members: Sequence[tuple[int, list[NamedParameter]]], limit: int, align: int
) -> list[tuple[int, BucketSpec]]:
    """The buckets of one key, each with the position of its last member."""
    specs: list[tuple[int, BucketSpec]] = []
    slots: list[ParameterSlot] = []
    last, numel = 0, 0
    for place, same in members:
        if slots and numel + same[0][1].numel() > limit:
            specs.append((last, _spec(key, slots, numel, align)))
            slots, last, numel = [], 0, 0
        slots.append(_slot(same, numel))
        last, numel = max(last, place), numel + -(-slots[-1].numel // align) * align
    return [*specs, (last, _spec(key, slots, numel, align))]


def _spec(key: BucketKey, slots: Sequence[ParameterSlot], numel: int, align: int) -> BucketSpec:
    """A bucket whose size divides into equal, aligned shards for the ranks of its shard group."""
    unit = key.reduction.data.shard.size * align if key.reduction.data.is_sharded else 1
    return BucketSpec(key, tuple(slots), -(-numel // unit) * unit)


def _slot(same: Sequence[NamedParameter], offset: int) -> ParameterSlot:
    name, first, _ = same[0]
    return ParameterSlot(name, tuple(first.shape), offset, tuple(parameter for _, parameter, _ in same))
