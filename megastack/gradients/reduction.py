"""The process groups over which the gradient of each parameter is summed.

The axes come from :func:`megastack.placement.placement.replication_of`; this module opens the groups. Every gradient is
summed over the data group first. Under ZeRO that sum is sharded: each rank of a **shard group** holds one shard of the
optimizer state and, at levels 2 and 3, of parameters and gradients. The shard group is the whole data group, or
``shard_size`` adjacent ranks of it (hybrid sharding, HSDP). In the latter case gradients are also summed over the
**replicas**, the ranks that hold the same shard in the other shard groups. Without ZeRO the shard group is this rank
alone and all ranks of the data group are replicas, so all levels share one code path. The other sums, over ``tp`` and
over tied stages, run on local shards.

A parameter is tied if the same global name, with the same shape, is present on several pipeline coordinates.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import nn

from megastack.comm.group import AxisGroup
from megastack.comm.objects import all_gather_objects
from megastack.errors import ConfigError, PlacementError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.placement import (
    DATA_AXES,
    Placement,
    Replication,
    is_replicated_over_data,
    replication_of,
)

NamedParameter = tuple[str, nn.Parameter, Placement]


@dataclass(frozen=True)
class DataSharding:
    """How the ranks of a data group share the state of a parameter.

    Attributes:
        shard: the ranks that hold one shard each; only this rank if nothing is sharded.
        replicas: the ranks that hold the same shard.
    """

    shard: AxisGroup
    replicas: AxisGroup

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds less than the whole state."""
        return self.shard.size > 1


@dataclass(frozen=True)
class Reduction:
    """How the gradients of one bucket are reduced; parameters share a bucket only if their reductions are equal.

    Attributes:
        data: the data group, over which every gradient is summed first.
        partial_over: the groups over which it is summed next, each with its axis.
        replication: the value from which the groups are derived.
    """

    data: DataSharding
    partial_over: tuple[tuple[Axis, AxisGroup], ...]
    replication: Replication

    def group_over(self, axis: Axis) -> AxisGroup | None:
        """The group along an axis over which the gradient is partial; ``None`` if it is not."""
        return dict(self.partial_over).get(axis)

    def is_owner(self, *, among_data: bool) -> bool:
        """Whether this rank owns its elements among all replicas, including data ranks if ``among_data``."""
        return self.replication.owns_replica and not (among_data and self.data.replicas.rank)


class Reduced(Protocol):
    """Gradients that are reduced together: a bucket or a shard."""

    @property
    def reduction(self) -> Reduction:
        """How they are reduced."""


_R = TypeVar("_R", bound=Reduced)


def partial_sums(shards: Sequence[_R], name_of: Callable[[_R], str]) -> list[list[tuple[_R, AxisGroup]]]:
    """The sums over partial gradients after the sum over the data group: rounds of shards with their groups.

    Each round runs over one axis, innermost axes first. Over ``pp`` shards are ordered by name, since the stages that
    hold a tied parameter use it in opposite orders.
    """
    rounds = []
    for axis in reversed(Axis):
        ordered = sorted(shards, key=name_of) if axis is Axis.PP else shards
        grouped = [(shard, shard.reduction.group_over(axis)) for shard in ordered]
        rounds.append([(shard, group) for shard, group in grouped if group is not None])
    return [sums for sums in rounds if sums]


@dataclass(frozen=True)
class Reductions:
    """The reductions of all parameters of a rank.

    Attributes:
        by_name: the reduction of each parameter, by global name.
        differ_over_data: whether ranks that differ only in dp and cp hold different elements of a trained parameter of
            the model. Identical on all ranks, including those without such a parameter.
    """

    by_name: Mapping[str, Reduction]
    differ_over_data: bool


def make_reductions(
    parameters: Sequence[NamedParameter], mesh: Mesh, *, zero: int = 0, shard_size: int | None = None
) -> Reductions:
    """Open the groups over which this rank's gradients are summed. Must be called on all ranks of the mesh.

    With several stages, a small collective over ``pp`` finds the tied parameters.

    Args:
        parameters: this rank's parameters, in the same order on all ranks of the stage.
        mesh: the mesh.
        zero: the ZeRO level.
        shard_size: the number of adjacent ranks of a data group that share a parameter under ZeRO; ``None`` for all.

    Raises:
        ConfigError: the shard size does not divide the size of a data group.
        PlacementError: a placement names an axis that is not available yet, or parameters are tied over overlapping
            sets of stages.
    """
    axes = dict.fromkeys([DATA_AXES, *(placement.data_axes for _, _, placement in parameters)])
    shardings = {each: data_sharding(mesh, each, zero, shard_size) for each in axes}
    tied, differ = agree_over_stages(trained_parameters(parameters, mesh, zero=zero, shard_size=shard_size), mesh)
    for stages in tied.values():
        mesh.subgroup(Axis.PP, stages)  # before groups inside a stage, so that all ranks open groups in the same order
    return Reductions(
        {
            name: reduction_of(name, placement, mesh, shardings[placement.data_axes], stages=tied.get(name, ()))
            for name, _, placement in parameters
        },
        differ,
    )


def data_sharding(
    mesh: Mesh, axes: tuple[Axis, ...] = DATA_AXES, zero: int = 0, shard_size: int | None = None
) -> DataSharding:
    """The shard group and the replicas of this rank in its data group along ``axes``. Must be called on all its ranks.

    Raises:
        ConfigError: the shard size does not divide the size of the data group.
    """
    data = mesh[axes]
    size = data.size if shard_size is None else shard_size
    if size < 1 or data.size % size:
        legal = ", ".join(str(n) for n in range(1, data.size + 1) if data.size % n == 0)
        label = "·".join(axes)
        raise ConfigError(f"parallel.zero.shard_size={size}: must divide {label} = {data.size}; use {legal}")
    if zero == 0:
        return DataSharding(mesh.subgroup(axes, [data.rank]), data)
    first = data.rank // size * size
    shard = mesh.subgroup(axes, range(first, first + size))
    return DataSharding(shard, mesh.subgroup(axes, range(data.rank % size, data.size, size)))


def reduction_of(
    name: str, placement: Placement, mesh: Mesh, data: DataSharding, *, stages: Sequence[int] = ()
) -> Reduction:
    """The reduction of one parameter on this rank; ``stages`` are the pipeline coordinates that hold it, if tied.

    Raises:
        PlacementError: the placement names an axis that is not available yet.
    """
    if mesh.shape.ep > 1 and Axis.EP in (placement.partial | placement.shards.keys()):
        raise PlacementError(f"{name}: its placement names ep, which is not available yet; use ep=1")
    replication = replication_of(placement, mesh.shape, mesh.coordinates, stages=stages)
    partial_over = tuple((group.axis, mesh.subgroup(group.axis, group.indices)) for group in replication.partial_over)
    return Reduction(data, partial_over, replication)


@dataclass(frozen=True, order=True)
class TrainedParameter:
    """A trained parameter as pipeline stages exchange it.

    Attributes:
        name: its global name.
        shape: its local shape.
        differs: whether ranks that differ only in dp and cp hold different elements of it.
    """

    name: str
    shape: tuple[int, ...]
    differs: bool


def trained_parameters(
    parameters: Sequence[NamedParameter], mesh: Mesh, *, zero: int = 0, shard_size: int | None = None
) -> list[TrainedParameter]:
    """The trained ones of these parameters, sorted; the arguments are those of :func:`make_reductions`."""
    found = set()
    for name, parameter, placement in parameters:
        if parameter.requires_grad:
            sharded = data_sharding(mesh, placement.data_axes, zero, shard_size).is_sharded
            differs = sharded or not is_replicated_over_data(placement, mesh.shape)
            found.add(TrainedParameter(name, tuple(parameter.shape), differs))
    return sorted(found)


def agree_over_stages(trained: Sequence[TrainedParameter], mesh: Mesh) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Find the parameters that several pipeline coordinates hold. Must be called on all ranks of a pipeline group.

    Gathers their descriptions over ``pp``, once, when buckets are built.

    Args:
        trained: this rank's trained parameters.
        mesh: the mesh.

    Returns:
        The pipeline coordinates that hold each tied parameter, by name, and whether a parameter of any stage differs
        over data ranks.

    Raises:
        PlacementError: on every rank, if two parameters are tied over different sets of stages that overlap.
    """
    stages = mesh[Axis.PP]
    if stages.size == 1:
        return {}, any(each.differs for each in trained)
    holders: dict[TrainedParameter, tuple[int, ...]] = {}
    for at, theirs in enumerate(all_gather_objects(trained, stages)):
        for each in theirs:
            holders[each] = (*holders.get(each, ()), at)
    _check_overlap({held for held in holders.values() if len(held) > 1}, trained, holders)
    tied = {each.name: holders[each] for each in trained if len(holders[each]) > 1}
    return dict(sorted(tied.items())), any(each.differs for each in holders)


def _check_overlap(
    sets: set[tuple[int, ...]],
    own: Sequence[TrainedParameter],
    holders: Mapping[TrainedParameter, tuple[int, ...]],
) -> None:
    """Raise if sets of stages overlap: ranks would open the groups in different orders and deadlock."""
    for one, other in itertools.combinations(sorted(sets), 2):
        if set(one) & set(other):
            tied = [each.name for each in own if holders[each] in (one, other)]
            raise PlacementError(
                f"tied parameters ({', '.join(sorted(tied))} here): one lives on the pipeline ranks {one}, another on "
                f"{other}; parameters must be tied over the same pipeline ranks, or over ranks that do not overlap"
            )
