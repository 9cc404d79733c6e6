"""Which parameter lies where in which flat bucket: planned once, alike on all ranks that reduce together.

Parameters are taken in reverse order of use (the last module's last parameter first), which is about the order in which
a backward completes their gradients. Those that agree in dtype, reduction and optimizer group share buckets, cut at a
size. Buckets are ordered by their last entry, so that the bucket that completes first comes first. Tied parameters are
ordered by name instead: the stages that share them use them in opposite orders, but must lay them out alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from megastack.errors import PlacementError
from megastack.gradients.parameter_groups import ParameterGroup
from megastack.gradients.reduction import Reduction
from megastack.placement.placement import Placement

ALIGNMENT_BYTES = 16
"""Every parameter starts at a multiple of this, which vectorised kernels want; common sizes need no filling."""


@dataclass(frozen=True)
class BucketKey:
    """What the parameters of one bucket have in common.

    Attributes:
        dtype: of the parameters.
        reduction: how their gradients are reduced.
        group: the optimizer group, ``None`` where the buckets were made without groups.
        decay: whether their placements let weight decay apply; ``True`` where ``group`` says all.
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
        placement: its placement.
        parameters: the tensors of this name: several where more than one stage of this rank holds it.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    placement: Placement
    parameters: tuple[nn.Parameter, ...]

    @property
    def numel(self) -> int:
        """The elements of the parameter on this rank."""
        return prod(self.shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a flat buffer of its bucket, in the parameter's shape."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class BucketSpec:
    """The content of one bucket: what its parameters share, where each lies, and the elements in all."""

    kind: BucketKey
    entries: tuple[ParameterSlot, ...]
    numel: int


NamedParameter = tuple[str, nn.Parameter, Placement]


def make_bucket_specs(
    parameters: Iterable[NamedParameter],
    kind_of: Callable[[str, nn.Parameter, Placement], BucketKey],
    *,
    gradient_dtype: Callable[[torch.dtype], torch.dtype],
    bucket_bytes: int,
) -> list[BucketSpec]:
    """The buckets of one rank, in the order in which their reductions start.

    Args:
        parameters: trained parameters by global name, in reverse order of use; a name may come more than once.
        kind_of: what decides whether two parameters may share a bucket.
        gradient_dtype: the dtype of the gradients of a parameter's dtype.
        bucket_bytes: the size of gradients at which a bucket is closed; a larger parameter has one of its own.
    """
    kinds: dict[BucketKey, list[tuple[int, list[NamedParameter]]]] = {}
    for place, same in enumerate(_by_name(parameters)):
        kinds.setdefault(kind_of(*same[0]), []).append((place, same))
    found: list[tuple[int, BucketSpec]] = []
    for kind, members in kinds.items():
        if kind.reduction.tied is not None:
            members.sort(key=lambda member: member[1][0][0])
        limit = max(1, bucket_bytes // gradient_dtype(kind.dtype).itemsize)
        align = ALIGNMENT_BYTES // min(kind.dtype.itemsize, gradient_dtype(kind.dtype).itemsize)
        found.extend(_cut(kind, members, limit, align))
    return [plan for _, plan in sorted(found, key=lambda pair: pair[0])]


def _by_name(parameters: Iterable[NamedParameter]) -> list[list[NamedParameter]]:
    """Parameters of one name together, at the place of the last: they are complete only when all are."""
    names: dict[str, list[NamedParameter]] = {}
    for named in parameters:
        names[named[0]] = [*names.pop(named[0], []), named]
    for name, same in names.items():
        forms = {(tuple(parameter.shape), parameter.dtype, placement) for _, parameter, placement in same}
        if len(forms) > 1:
            raise PlacementError(f"{name}: stages of one rank hold it with different shapes, dtypes or placements")
    return list(names.values())


def _cut(
    kind: BucketKey, members: Sequence[tuple[int, list[NamedParameter]]], limit: int, align: int
) -> list[tuple[int, BucketSpec]]:
    """The buckets of one kind, each with the place of its last member."""
    plans: list[tuple[int, BucketSpec]] = []
    entries: list[ParameterSlot] = []
    last, numel = 0, 0
    for place, same in members:
        if entries and numel + same[0][1].numel() > limit:
            plans.append((last, _plan(kind, entries, numel, align)))
            entries, last, numel = [], 0, 0
        entries.append(_entry(same, numel))
        last, numel = max(last, place), numel + -(-entries[-1].numel // align) * align
    return [*plans, (last, _plan(kind, entries, numel, align))]


def _plan(kind: BucketKey, entries: Sequence[ParameterSlot], numel: int, align: int) -> BucketSpec:
    """A bucket whose size can be cut into equal, aligned slices for the ranks that share it."""
    unit = kind.reduction.data.shard.size * align if kind.reduction.data.shard.size > 1 else 1
    return BucketSpec(kind, tuple(entries), -(-numel // unit) * unit)


def _entry(same: Sequence[NamedParameter], offset: int) -> ParameterSlot:
    name, first, placement = same[0]
    return ParameterSlot(name, tuple(first.shape), offset, placement, tuple(parameter for _, parameter, _ in same))
