"""Over which ranks a gradient is summed, and which copy of it counts: all of it follows from the placement.

Every gradient is partial over ``dp·cp``. Under ZeRO-1 that sum is left in slices, one on each of the ranks that share a
bucket (:mod:`megastack.gradients.sharding`), and what follows is done to slices. What else is to be summed depends on
how the parameter lies on the mesh:

==========================================  =========================================  ==============================
parameter                                   after ``dp·cp``, also summed over          counts in the norm on
==========================================  =========================================  ==============================
cut over tp                                 -                                          every rank
cut over tp, with copies                    the ``tp`` ranks that hold copies of it    copy 0
whole on every tp rank, full gradient       -                                          tp coordinate 0
whole on every tp rank, partial gradient    ``tp``                                     tp coordinate 0
tied: one name on several pipeline stages   … and then its stages (``pp``)             … of its first stage
==========================================  =========================================  ==============================

A parameter is tied when the same global name, with the same shape, lives on several pipeline coordinates.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megastack.comm.collectives import all_gather, all_reduce
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError
from megastack.gradients.sharding import Sharding, sharding_of
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.boxes import owns_replica
from megastack.placement.placement import Placement


@dataclass(frozen=True)
class Reduction:
    """How the gradients of one bucket are reduced; parameters share a bucket only if theirs are equal.

    Attributes:
        data: the ``dp·cp`` ranks, over which every gradient is summed first: those that share the parameters' state
            in slices, and those that hold the same slice.
        tensor: the ``tp`` ranks over which it is summed next, ``None`` for none.
        tied: the stages that hold the same parameter, over which it is summed last, ``None`` for none.
        whole: whether every tp rank holds the whole parameter. Buckets are cut alike on all tp ranks because this is
            part of what tells them apart, and ``is_owner`` is a consequence.
        counted: whether this rank's copy is the one that counts in the norm.
    """

    data: Sharding
    tensor: AxisGroup | None
    tied: AxisGroup | None
    whole: bool
    is_owner: bool


def reduction_of(
    name: str, placement: Placement, mesh: Mesh, tied: Mapping[str, AxisGroup], data: Sharding | None = None
) -> Reduction:
    """The reduction of one parameter on this rank; nothing is shared in slices unless ``data`` says so.

    Raises:
        PlacementError: the placement is partial or cut over an axis that is not available yet.
    """
    _refuse_expert_axis(name, placement, mesh)
    pair = tied.get(name)
    pair = pair if pair is not None and pair.size > 1 else None
    is_owner = owns_replica(placement, mesh.shape, mesh.coordinates) and (pair is None or pair.rank == 0)
    whole = mesh.shape.tp > 1 and Axis.TP not in placement.shards
    return Reduction(data or sharding_of(mesh), _tensor_group(placement, mesh), pair, whole, is_owner)


def _tensor_group(placement: Placement, mesh: Mesh) -> AxisGroup | None:
    if mesh.shape.tp == 1:
        return None
    if Axis.TP in placement.partial:
        return mesh[Axis.TP]
    shard = placement.shards.get(Axis.TP)
    if shard is None or shard.copies == 1:
        return None
    first = mesh.coordinates[Axis.TP] // shard.copies * shard.copies
    return mesh.subgroup(Axis.TP, range(first, first + shard.copies))


def _refuse_expert_axis(name: str, placement: Placement, mesh: Mesh) -> None:
    if mesh.shape.ep > 1 and Axis.EP in (placement.partial | placement.shards.keys()):
        raise PlacementError(f"{name}: its placement names ep, which is not available yet; use ep=1")


def tied_groups(parameters: Sequence[tuple[str, torch.Tensor]], mesh: Mesh) -> dict[str, AxisGroup]:
    """The parameters that other pipeline coordinates hold as well, each with the group of those that do.

    All ranks of a pipeline group must call. Two small collectives over ``pp``, once, when buckets are made.

    Args:
        parameters: this rank's parameters by global name.
        mesh: the mesh.

    Raises:
        PlacementError: on every rank, when two parameters are tied over unlike sets of stages that overlap.
    """
    stages = mesh[Axis.PP]
    if stages.size == 1:
        return {}
    names = {_fingerprint(name, tuple(parameter.shape)): name for name, parameter in parameters}
    everywhere = _gather_numbers(sorted(names), mesh)
    holders = {
        number: tuple(at for at, held in enumerate(everywhere) if number in held) for number in set().union(*everywhere)
    }
    _refuse_overlap({stages for stages in holders.values() if len(stages) > 1}, names, holders)
    return {
        name: mesh.subgroup(Axis.PP, holders[number])
        for number, name in sorted(names.items(), key=lambda item: item[1])
        if len(holders[number]) > 1
    }


def _refuse_overlap(
    sets: set[tuple[int, ...]], names: Mapping[int, str], holders: Mapping[int, tuple[int, ...]]
) -> None:
    """Unlike sets of stages that overlap would open their groups in unlike numbers on each rank, and wait for ever."""
    for one, other in itertools.combinations(sorted(sets), 2):
        if set(one) & set(other):
            tied = [name for number, name in names.items() if holders[number] in (one, other)]
            raise PlacementError(
                f"tied parameters ({', '.join(sorted(tied))} here): one lives on the pipeline ranks {one}, another on "
                f"{other}; parameters must be tied over the same pipeline ranks, or over ranks that do not overlap"
            )


def _gather_numbers(numbers: Sequence[int], mesh: Mesh) -> list[set[int]]:
    """Every pipeline coordinate's numbers."""
    stages = mesh[Axis.PP]
    longest = int(all_reduce(torch.tensor(len(numbers), device=mesh.device), stages, "max"))
    padded = [*numbers, *[0] * (longest - len(numbers))]
    rows = all_gather(torch.tensor([padded], dtype=torch.int64, device=mesh.device), stages).tolist()
    return [set(row) - {0} for row in rows]


def _fingerprint(name: str, shape: tuple[int, ...]) -> int:
    digest = hashlib.blake2b(f"{name} {shape}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
