"""A live mesh: a shape, this rank's coordinates, and the process groups along its axes.

A mesh is passed as a value; two can exist in one process. Groups come from torch's ``DeviceMesh``, so that FSDP2 and
distributed checkpoints use the same objects. Axes of size 1 exist and communicate nothing.

Creating a process group is a collective. All ranks of the world create the groups that training needs when they
create the mesh. Only the members of a group call :meth:`Mesh.subgroup`, whatever other groups each of them has created.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from megastack.comm.backend import backend_of, may_share_memory
from megastack.comm.flight_recorder import FlightRecorder
from megastack.comm.group import AxisGroup
from megastack.comm.observer import NO_OBSERVER, Observer, RankObserver
from megastack.comm.peers import absent_peers
from megastack.comm.shared_memory.connect import requested_transport, share_memory
from megastack.comm.shared_memory.group import SharedGroup
from megastack.comm.shared_memory.plan import SMALL_RING_BYTES, GroupPlan
from megastack.comm.traffic import Ledger
from megastack.errors import MeshError, RankEnvironmentError
from megastack.mesh.device import DeviceDescription, pick_device, select_device
from megastack.mesh.environment import RankEnvironment, read_environment
from megastack.mesh.groups import FUSED_AXES, group_plans, grouped_axes
from megastack.mesh.shape import DENSE_AXES, Axis, MeshShape, describe_coordinates
from megastack.mesh.store import check_devices, open_store
from megastack.torch_private import group_names, set_timeout, timeout_of

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEFAULT_TIMEOUT_S = distributed_c10d.default_pg_timeout.total_seconds()

_PLACES: Mapping[object, int] = {axis: place for place, axis in enumerate(DENSE_AXES)}


class Mesh:
    """This rank's view of the device mesh.

    ``mesh[Axis.TP]`` is the group along one axis, ``mesh[Axis.DP, Axis.CP]`` a fused one. Use :meth:`single` for one
    rank without a process group, and :meth:`from_environment` for a worker of torchrun, Slurm or megastack's launcher.

    Attributes:
        shape: the degrees.
        rank: this rank.
        device: the device of its tensors.
        coordinates: this rank's coordinate on every axis.
        device_mesh: torch's view of the axes larger than 1; ``None`` if there are none.
        observer: receives the operations on all groups of this mesh.
        backward_channels: a second group of the ``pp`` ranks, for messages to lower ranks (see
            :mod:`megastack.comm.p2p`). ``None`` if ``pp`` is 1.
        transport: describes how its ranks communicate.
    """

    def __init__(
        self,
        shape: MeshShape,
        rank: int,
        device: torch.device,
        device_mesh: DeviceMesh | None,
        *,
        timeout: timedelta | None = None,
        observer: Observer = NO_OBSERVER,
        cpu_transport: str = "gloo",
    ) -> None:
        self.shape = shape
        self.rank = rank
        self.device = device
        self.device_mesh = device_mesh
        self.observer = observer
        self.coordinates = shape.coordinates(rank)
        self._timeout = timeout
        self._groups: dict[tuple[object, ...], AxisGroup] = {}
        self._along: list[AxisGroup | None] = [None for _ in DENSE_AXES]
        self._cpu_transport = cpu_transport
        self.transport = backend_of(device).process_groups
        self._process_groups: dict[tuple[Axis, ...], dist.ProcessGroup] = {}
        self._shared: dict[tuple[Axis, ...], SharedGroup | None] = {}
        self.backward_channels: dist.ProcessGroup | None = None
        if device_mesh is not None:
            for axes in grouped_axes(shape):
                self._process_group(axes)
            if shape.pp > 1:
                self.backward_channels = self._new_group((Axis.PP,))
            if self._shares_memory:  # the last step: a rank that ends soon must not end while others still connect
                self._share_memory()
            for fused in FUSED_AXES:
                self[fused]

    @classmethod
    def single(cls, device: str | torch.device = "cpu") -> Mesh:
        """A mesh of one rank without an observer; it needs no process group and never communicates.

        Makes a GPU the current device of this process.

        Raises:
            MeshError: there is no such GPU.
        """
        return cls(MeshShape(), 0, select_device(torch.device(device)), None)

    @classmethod
    def from_environment(
        cls,
        shape: MeshShape,
        *,
        device: str = "auto",
        timeout_s: float | None = None,
        observer: Observer | None = None,
        cpu_transport: str = "auto",
    ) -> Mesh:
        """Create the mesh of a worker that a launcher started.

        Uses the default process group if there is one. Otherwise opens it from ``RANK``, ``WORLD_SIZE``,
        ``MASTER_ADDR`` and ``MASTER_PORT``, or from Slurm's variables in a task of srun. Without these variables a
        shape of one rank needs no process group. A rank stops waiting for another after ``timeout_s`` seconds (default:
        torch's), in this call as well. Without an ``observer`` the mesh creates its own
        :class:`~megastack.comm.observer.RankObserver`. ``cpu_transport`` is ``gloo``, ``shared_memory`` for groups of
        CPU ranks, which must be on one host, or ``auto``: shared memory where possible.

        Raises:
            MeshError: the shape's world size is not the number of ranks, there is no launcher or no such device, or
                ranks that should share memory cannot.
            RankEnvironmentError: the variables are invalid, or rank 0 cannot be reached at the given address.
        """
        target, observer = pick_device(device), observer or RankObserver()
        transport, backend = requested_transport(cpu_transport), backend_of(target)
        if cpu_transport == "shared_memory" and not may_share_memory(target):
            raise MeshError(f"cpu_transport={cpu_transport}: the ranks compute on {target}; use auto")
        observer.use_device(backend.events)
        limit = None if timeout_s is None else timedelta(seconds=timeout_s + backend.timeout_margin_s)
        if not dist.is_initialized():
            launched = read_environment()
            if launched is None and shape.world_size == 1:
                return cls(shape, 0, target, None, observer=observer)
            _open_world(shape, launched, target, timeout_s)
        _require_size(shape, dist.get_world_size())
        grid = _device_mesh(shape, target, limit)
        return cls(shape, dist.get_rank(), target, grid, timeout=limit, observer=observer, cpu_transport=transport)

    @property
    def ledger(self) -> Ledger:
        """The communication counters of this rank, over all groups of this mesh; empty without an observer."""
        return self.observer.ledger

    @property
    def flight_recorder(self) -> FlightRecorder:
        """The flight recorder of this rank; empty without an observer."""
        return self.observer.flight_recorder

    @property
    def world(self) -> AxisGroup:
        """All ranks of the mesh."""
        return self[DENSE_AXES]

    def __getitem__(self, axes: Axis | tuple[Axis, ...]) -> AxisGroup:
        # Layers look up single axes at every call. Compiled code depends on the length of a container that it reads,
        # so these groups are in a list that does not grow.
        place = _PLACES.get(axes)
        known = self._groups.get((axes,)) if place is None else self._along[place]
        if known is not None:
            return known
        named = (axes,) if isinstance(axes, str) else axes
        requested = tuple(axis for axis in DENSE_AXES if axis in named)
        if len(requested) != len(set(named)):
            raise MeshError(f"{named}: must be axes among {', '.join(DENSE_AXES)}")
        real = tuple(axis for axis in requested if self.shape.size(axis) > 1)
        key = (requested,)
        if key not in self._groups:
            self._groups[key] = self._axis_group(real, _label(requested, real))
        self._groups[(axes,)] = self._groups[key]
        if place is not None:
            self._along[place] = self._groups[key]
        return self._groups[key]

    def groups(self, without: Collection[AxisGroup] = ()) -> list[AxisGroup]:
        """The groups of several ranks that were requested so far, each process group once.

        Args:
            without: groups to leave out; a process group remains if another group in use shares it.
        """
        left_out = {id(group) for group in without}
        used = [group for group in self._groups.values() if group.group is not None and id(group) not in left_out]
        return list({id(group.group): group for group in used}.values())

    def subgroup(self, axis: Axis | tuple[Axis, ...], indices: Sequence[int]) -> AxisGroup:
        """The group of this rank's ``axis`` peers at the given coordinates. Must be called on exactly these ranks.

        Raises:
            MeshError: this rank is not among them, or a coordinate is out of range.
        """
        whole, chosen = self[axis], tuple(sorted(set(indices)))
        if whole.rank not in chosen:
            raise MeshError(
                f"{axis}={whole.rank}: is not a member of the subgroup {chosen}; only members may request it"
            )
        if chosen[0] < 0 or chosen[-1] >= whole.size:
            raise MeshError(f"subgroup {chosen}: coordinates of {axis} are 0 … {whole.size - 1}")
        if len(chosen) == whole.size:
            return whole
        if len(chosen) == 1:
            return AxisGroup.single(whole.axis, self.observer, self.rank)
        key = (axis, "sub", chosen)
        if key not in self._groups:
            ranks = [whole.ranks[i] for i in chosen]
            with group_names(_name_by_ranks):
                group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
            place = chosen.index(whole.rank)
            shared = None
            if self._shares_memory:
                plan = GroupPlan(whole.axis, tuple(ranks), SMALL_RING_BYTES)
                (shared,), _ = self._shared_groups([plan], tuple(ranks), group)
            self._groups[key] = AxisGroup(place, len(chosen), tuple(ranks), group, whole.axis, self.observer, shared)
        return self._groups[key]

    def _axis_group(self, axes: tuple[Axis, ...], label: str) -> AxisGroup:
        if not axes:
            return AxisGroup.single(label, self.observer, self.rank)
        assert self.device_mesh is not None, f"{self.shape}: a mesh without process groups has no group along {label}"
        group = self._process_group(axes)
        members = tuple(dist.get_process_group_ranks(group))
        place, shared = members.index(self.rank), self._shared.get(axes)
        return AxisGroup(place, len(members), members, group, label, self.observer, shared)

    def _process_group(self, axes: tuple[Axis, ...]) -> dist.ProcessGroup:
        """Torch's group along axes of more than one rank, created if there is none."""
        assert self.device_mesh is not None
        if axes not in self._process_groups:
            group: dist.ProcessGroup | None
            if len(axes) == 1:
                group = self.device_mesh.get_group(axes[0].value)
            elif len(axes) == self.device_mesh.ndim:
                group = dist.group.WORLD
            else:
                group = self._new_group(axes)
            assert group is not None
            self._process_groups[axes] = group
        return self._process_groups[axes]

    @property
    def _shares_memory(self) -> bool:
        return self._cpu_transport != "gloo" and may_share_memory(self.device) and absent_peers() is None

    def _share_memory(self) -> None:
        """Set up shared memory for the groups that the mesh creates."""
        axes, everyone = grouped_axes(self.shape), tuple(range(self.shape.world_size))
        shared, self.transport = self._shared_groups(group_plans(self.shape, self.rank), everyone, dist.group.WORLD)
        self._shared = dict(zip(axes, shared, strict=True))

    def _shared_groups(
        self, plans: list[GroupPlan], ranks: tuple[int, ...], group: dist.ProcessGroup | None
    ) -> tuple[list[SharedGroup | None], str]:
        """The groups of ``plans`` in shared memory, and a description; called by all ranks of a process group."""
        assert group is not None
        members = AxisGroup(ranks.index(self.rank), len(ranks), ranks, group, "shared_memory")
        return share_memory(plans, self.rank, members, self._cpu_transport, timeout_of(group).total_seconds())

    def _new_group(self, axes: tuple[Axis, ...]) -> dist.ProcessGroup:
        return _new_group(self.shape, axes, self.rank, self._timeout)

    def __repr__(self) -> str:
        return f"Mesh({self.shape}, rank {self.rank} | {describe_coordinates(self.coordinates)}, {self.device})"


def _name_by_ranks(ranks: list[int], names: Collection[str]) -> str:
    """A name for a process group that is created by its members only, identical on all of them.

    Torch's default name includes the number of groups that the process has created. Members that created different
    numbers of groups (two tied stages, where the stages between take no part) would wait for each other forever. This
    name includes the number of groups of the same ranks instead, which is equal on all of them.
    """
    name = f"megastack_{'_'.join(map(str, ranks))}:"
    return f"{name}{sum(other.startswith(name) for other in names)}"


def open_process_group(store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Open the default process group of ranks that share a store.

    Args:
        store: shared by these ranks only.
        rank: this rank.
        world_size: the number of ranks.
        device: the device of this rank.
        timeout_s: how long a rank waits for another.

    Raises:
        MeshError: ranks share a GPU, or have different kinds of device.
    """
    backend = backend_of(device)
    check_devices(store, rank, world_size, DeviceDescription.of(device), timeout_s)
    limit = timedelta(seconds=timeout_s + backend.timeout_margin_s)
    dist.init_process_group(backend.process_groups, store=store, rank=rank, world_size=world_size, timeout=limit)


def _open_world(
    shape: MeshShape, launched: RankEnvironment | None, device: torch.device, timeout_s: float | None
) -> None:
    """Open the default process group of the ranks that a launcher started."""
    if launched is None:
        missing = ", ".join(name for name in LAUNCHER_VARIABLES if name not in os.environ)
        raise MeshError(
            f"{shape}: {shape.world_size} ranks need a launcher, but {missing} are not set; start with "
            "`megastack train`, torchrun or srun, or use run_ranks"
        )
    _require_size(shape, launched.world_size)
    address, port = launched.require_endpoint()
    limit_s = _DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    store = open_store(launched, limit_s)
    if store is None:
        raise RankEnvironmentError(
            f"MASTER_ADDR={address}, MASTER_PORT={port}: rank 0 could not be reached at {address}:{port} within "
            f"{limit_s:g} s; check that it was started there"
        )
    open_process_group(store, launched.rank, launched.world_size, device, limit_s)


def _require_size(shape: MeshShape, ranks: int) -> None:
    if ranks != shape.world_size:
        raise MeshError(
            f"pp={shape.pp} dp={shape.dp} cp={shape.cp} tp={shape.tp}: the product {shape.world_size} must be the "
            f"number of ranks, {ranks}"
        )


def _new_group(shape: MeshShape, axes: tuple[Axis, ...], rank: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """The group of ``rank`` along ``axes``. All ranks call this, and each takes part in creating every group."""
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in shape.groups(*axes)]
    return next(group for ranks, group in made if rank in ranks)


def _device_mesh(shape: MeshShape, device: torch.device, timeout: timedelta | None) -> DeviceMesh | None:
    """Torch's mesh over groups that are created here, since ``DeviceMesh`` ignores the time-out for its own."""
    axes = [axis for axis in DENSE_AXES if shape.size(axis) > 1]
    if not axes:
        return None
    names = tuple(axis.value for axis in axes)
    if len(axes) == 1 and (world := dist.group.WORLD) is not None:
        if timeout is not None:
            set_timeout(world, timeout)
        return DeviceMesh.from_group(world, device.type, mesh_dim_names=names)
    groups = [_new_group(shape, (axis,), dist.get_rank(), timeout) for axis in axes]
    ranks = torch.arange(shape.world_size).view([shape.size(axis) for axis in axes])
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=names)


def _label(requested: tuple[Axis, ...], real: tuple[Axis, ...]) -> str:
    """The label of a group: ``dp`` stands for ``dp·cp``; other fused axes join their names."""
    names = (Axis.DP if axis is Axis.CP and Axis.DP in requested else axis for axis in real or requested)
    return "_".join(dict.fromkeys(names))
