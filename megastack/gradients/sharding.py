"""Who shares the optimizer's state of a parameter: the groups that ``dp·cp`` is cut into.

Under ZeRO the ranks of a **shard group** hold a slice each, of the optimizer's state or (stages 2 and 3) of everything.
The shard group is all of ``dp·cp``, or ``shard_size`` adjacent ranks of it (hybrid sharding, HSDP): then gradients are
also summed over the **replicas**, the ranks that hold the same slice in the other shard groups. Without ZeRO the shard
group is this rank alone and all of ``dp·cp`` are replicas, so everything that follows has one path.
"""

from __future__ import annotations

from dataclasses import dataclass

from megastack.comm.group import AxisGroup
from megastack.errors import ConfigError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis

_DATA = (Axis.DP, Axis.CP)


@dataclass(frozen=True)
class ShardingOptions:
    """What is shared among data ranks, and when it travels.

    Attributes:
        stage: 0 nothing, 1 the optimizer's state, 2 and 3 parameters and gradients as well.
        shard_size: the adjacent ``dp·cp`` ranks that share; ``None`` for all.
        gather: under stage 3, whether parameters are gathered once a ``step`` or for each ``microbatch``.
        reduce: under stages 2 and 3, whether gradients are reduced once a ``step`` or after each ``microbatch``.
    """

    stage: int = 0
    shard_size: int | None = None
    gather: str = "step"
    reduce: str = "step"


@dataclass(frozen=True)
class Sharding:
    """How the ``dp·cp`` ranks of one parameter share its state.

    Attributes:
        shard: the ranks that hold a slice each; this rank alone where nothing is shared.
        replicas: the ranks that hold the same slice.
    """

    shard: AxisGroup
    replicas: AxisGroup

    @property
    def is_owner(self) -> bool:
        """Whether this rank's slice is the one that counts among its replicas; all of them where nothing is shared."""
        return self.shard.size == 1 or self.replicas.rank == 0


def sharding_of(mesh: Mesh, zero: int = 0, shard_size: int | None = None) -> Sharding:
    """The groups of a ZeRO stage on this rank; all ranks of the mesh call, before they make other subgroups.

    Raises:
        ConfigError: a shard size that does not divide dp·cp.
    """
    data = mesh[_DATA]
    size = data.size if shard_size is None else shard_size
    if size < 1 or data.size % size:
        legal = ", ".join(str(n) for n in range(1, data.size + 1) if data.size % n == 0)
        raise ConfigError(f"parallel.zero.shard_size={size}: must divide dp·cp = {data.size}; use {legal}")
    if zero == 0:
        return Sharding(AxisGroup.single(data.axis, mesh.observer, mesh.rank), data)
    first = data.rank // size * size
    shard = mesh.subgroup(_DATA, range(first, first + size))
    return Sharding(shard, mesh.subgroup(_DATA, range(data.rank % size, data.size, size)))
