"""A live mesh: a shape, this rank's place on it, and the process groups along its axes.

A mesh is a value that is passed; two can live in one process. Groups come from torch's ``DeviceMesh``, so that FSDP2
and distributed checkpoints use the same objects; axes of size 1 exist and communicate nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megastack.comm.group import AxisGroup
from megastack.comm.ledger import Ledger
from megastack.errors import MeshError
from megastack.mesh.shape import DENSE_AXES, Axis, MeshShape, describe_coordinates

_FUSED = ((Axis.DP, Axis.CP), (Axis.PP, Axis.TP), (Axis.PP, Axis.DP, Axis.CP))
"""The fused groups that training needs, opened with the mesh. torch names a new group by its ranks *and* the number of
groups its maker holds, so members that hold unlike numbers wait for each other for ever; a subgroup of a tied parameter
makes them unlike between stages. Therefore these come first."""


class Mesh:
    """This rank's view of a grid of ranks.

    ``mesh[Axis.TP]`` is the group along one axis, ``mesh[Axis.DP, Axis.CP]`` a fused one. Use :meth:`single` for one
    rank without any process group, :meth:`from_environment` for a worker of torchrun, Slurm or megastack's launcher.
    """

    def __init__(self, shape: MeshShape, rank: int, device: torch.device, device_mesh: DeviceMesh | None) -> None:
        self.shape = shape
        self.rank = rank
        self.device = device
        self.device_mesh = device_mesh
        self.ledger = Ledger()
        self.coordinates = shape.coordinates(rank)
        self._groups: dict[tuple[object, ...], AxisGroup] = {}
        for axes in _FUSED if device_mesh is not None else ():
            self[axes]

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> Mesh:
        """A mesh of one rank; needs no process group and never communicates."""
        return cls(MeshShape(), 0, torch.device(device), None)

    @classmethod
    def from_environment(cls, shape: MeshShape, *, device: str = "auto", timeout_s: float | None = None) -> Mesh:
        """The mesh of a worker that a launcher started.

        Uses the default process group if there is one, else opens it from ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
        ``MASTER_PORT``; without these variables a shape of one rank stands alone. A rank gives up waiting for another
        after ``timeout_s`` seconds (torch's default if not given).

        Raises:
            MeshError: the shape's world size is not the number of ranks.
        """
        target = pick_device(device)
        if not dist.is_initialized():
            if "RANK" not in os.environ and shape.world_size == 1:
                return cls.single(target)
            limit = None if timeout_s is None else timedelta(seconds=timeout_s)
            dist.init_process_group(backend_of(target), timeout=limit)
        if dist.get_world_size() != shape.world_size:
            raise MeshError(
                f"pp={shape.pp} dp={shape.dp} cp={shape.cp} tp={shape.tp}: the product {shape.world_size} must be the "
                f"number of ranks, {dist.get_world_size()}"
            )
        return cls(shape, dist.get_rank(), target, _device_mesh(shape, target))

    @property
    def world(self) -> AxisGroup:
        """All ranks of the mesh."""
        return self[DENSE_AXES]

    def __getitem__(self, axes: Axis | tuple[Axis, ...]) -> AxisGroup:
        named = (axes,) if isinstance(axes, str) else axes
        wanted = tuple(axis for axis in DENSE_AXES if axis in named)
        if len(wanted) != len(set(named)):
            raise MeshError(f"{named}: a group is made of {', '.join(DENSE_AXES)}")
        real = tuple(axis for axis in wanted if self.shape.size(axis) > 1)
        key = (wanted,)
        if key not in self._groups:
            self._groups[key] = self._axis_group(real, _label(wanted, real))
        return self._groups[key]

    def subgroup(self, axis: Axis, indices: Sequence[int]) -> AxisGroup:
        """The members of this rank's ``axis`` group at the given coordinates; only those members call.

        Raises:
            MeshError: this rank is not one of them.
        """
        whole, chosen = self[axis], tuple(sorted(set(indices)))
        if whole.rank not in chosen:
            raise MeshError(f"{axis}{whole.rank}: not a member of the subgroup {chosen}")
        if len(chosen) == whole.size:
            return whole
        if len(chosen) == 1:
            return AxisGroup.single(axis, self.ledger, self.rank)
        key = (axis, "sub", chosen)
        if key not in self._groups:
            ranks = [whole.ranks[i] for i in chosen]
            group = dist.new_group(ranks, use_local_synchronization=True)
            self._groups[key] = AxisGroup(chosen.index(whole.rank), len(chosen), tuple(ranks), group, axis, self.ledger)
        return self._groups[key]

    def _axis_group(self, axes: tuple[Axis, ...], label: str) -> AxisGroup:
        if not axes:
            return AxisGroup.single(label, self.ledger, self.rank)
        assert self.device_mesh is not None
        group: dist.ProcessGroup | None
        if len(axes) == 1:
            group = self.device_mesh.get_group(axes[0].value)
        elif len(axes) == self.device_mesh.ndim:
            group = dist.group.WORLD
        else:
            ranks = next(group for group in self.shape.groups(*axes) if self.rank in group)
            group = dist.new_group(ranks, use_local_synchronization=True)
        assert group is not None
        members = tuple(dist.get_process_group_ranks(group))
        return AxisGroup(members.index(self.rank), len(members), members, group, label, self.ledger)

    def __repr__(self) -> str:
        return f"Mesh({self.shape}, rank {self.rank} | {describe_coordinates(self.coordinates)}, {self.device})"


def pick_device(device: str) -> torch.device:
    """``auto`` is this process's GPU where there is one, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        index = int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count())
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(device)


def backend_of(device: torch.device) -> str:
    """The backends of a job on this device; a GPU job keeps gloo beside NCCL for host messages."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _device_mesh(shape: MeshShape, device: torch.device) -> DeviceMesh | None:
    axes = [axis for axis in DENSE_AXES if shape.size(axis) > 1]
    if not axes:
        return None
    ranks = torch.arange(shape.world_size).view([shape.size(axis) for axis in axes])
    return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(axis.value for axis in axes))


def _label(wanted: tuple[Axis, ...], real: tuple[Axis, ...]) -> str:
    """The ledger's name of a group: ``dp`` stands for ``dp·cp``; other fusions join their names."""
    named = tuple(axis for axis in (real or wanted) if axis is not Axis.CP or Axis.DP not in wanted)
    if not named or named == (Axis.CP,):
        named = (Axis.DP,) if Axis.DP in wanted else named
    return "_".join(axis.value for axis in named)
