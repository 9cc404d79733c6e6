"""The grid of ranks as a value: axis names, degrees, and the arithmetic between ranks and coordinates.

It needs neither torch nor processes, so describing 16,384 ranks is as cheap as describing one. From outermost to
innermost the axes are ``pp, dp, cp, tp``: tensor-parallel peers are adjacent, pipeline peers far apart. ``ep`` is not a
factor of the world size. The expert view regroups the ``dp x cp`` ranks of a stage as ``edp x ep`` with ``ep``
adjacent, so each rank also has an ``ep`` coordinate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from megastack.errors import MeshError


class Axis(StrEnum):
    """The axes of a mesh, in the order in which they are printed."""

    PP = "pp"
    DP = "dp"
    CP = "cp"
    TP = "tp"
    EP = "ep"


DENSE_AXES = (Axis.PP, Axis.DP, Axis.CP, Axis.TP)
"""The axes whose degrees multiply to the world size, outermost first."""


@dataclass(frozen=True)
class MeshShape:
    """The degree of each axis; the world size is ``pp * dp * cp * tp``.

    Raises:
        MeshError: a degree is not a positive integer, or ``ep`` does not divide ``dp * cp``.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in Axis:
            degree = self.size(axis)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise MeshError(f"{axis}={degree!r}: must be a positive integer")
        if (self.dp * self.cp) % self.ep:
            raise MeshError(f"ep={self.ep}: must divide dp * cp = {self.dp * self.cp}")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: Axis) -> int:
        """The degree of one axis."""
        degree: int = getattr(self, axis.value)
        return degree

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """The coordinates of a rank on every axis, ``ep`` included.

        Raises:
            MeshError: the rank is not in the grid.
        """
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank={rank}: must be one of 0 … {self.world_size - 1} of {self}")
        rest, found = rank, {}
        for axis in reversed(DENSE_AXES):
            rest, found[axis] = divmod(rest, self.size(axis))
        ordered = {axis: found[axis] for axis in DENSE_AXES}
        ordered[Axis.EP] = (found[Axis.DP] * self.cp + found[Axis.CP]) % self.ep
        return ordered

    def rank_at(self, **coordinates: int) -> int:
        """The rank at the given coordinates; omitted axes are 0.

        Raises:
            MeshError: an axis is unknown or not addressable (``ep``), or its coordinate is out of range.
        """
        rank = 0
        unknown = set(coordinates) - {axis.value for axis in DENSE_AXES}
        if unknown:
            raise MeshError(f"{', '.join(sorted(unknown))}: no such coordinate; use pp, dp, cp or tp")
        for axis in DENSE_AXES:
            at = coordinates.get(axis.value, 0)
            if not 0 <= at < self.size(axis):
                raise MeshError(f"{axis}={at}: must be one of 0 … {self.size(axis) - 1}")
            rank = rank * self.size(axis) + at
        return rank

    def groups(self, *axes: Axis) -> list[list[int]]:
        """The partition of all ranks into groups that differ only along ``axes``, each in rank order.

        ``groups(Axis.TP)`` lists the tensor-parallel groups, ``groups(Axis.DP, Axis.CP)`` the fused ones. ``Axis.EP``
        cannot be fused: its groups are adjacent members of the fused data- and context-parallel groups.
        """
        requested = {Axis(axis) for axis in axes}
        if Axis.EP in requested:
            return self._expert_groups(requested)
        members: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            members.setdefault(tuple(at[axis] for axis in DENSE_AXES if axis not in requested), []).append(rank)
        return list(members.values())

    def _expert_groups(self, requested: set[Axis]) -> list[list[int]]:
        if requested != {Axis.EP}:
            raise MeshError("ep: expert groups cannot be fused with another axis")
        fused = self.groups(Axis.DP, Axis.CP)
        cuts = [group[i : i + self.ep] for group in fused for i in range(0, len(group), self.ep)]
        return sorted(cuts)

    def table(self, limit: int = 16) -> str:
        """Format the grid with one line per rank and its coordinates; beyond ``limit`` ranks the middle is omitted."""
        axes = [axis for axis in Axis if axis in (Axis.PP, Axis.DP, Axis.TP) or self.size(axis) > 1]
        width = max(4, len(str(self.world_size - 1)))
        head = " " * max(0, width - 4) + "rank  " + "  ".join(f"{axis:>4}" for axis in axes)
        lines = [head]
        for rank in self._shown(limit):
            if rank is None:
                lines.append(" " * (width - 1) + "⋮")
                continue
            at = self.coordinates(rank)
            lines.append(f"{rank:>{width}}  " + "  ".join(f"{at[axis]:>4}" for axis in axes))
        return "\n".join(lines)

    def _shown(self, limit: int) -> Iterator[int | None]:
        if self.world_size <= limit:
            yield from range(self.world_size)
            return
        half = limit // 2
        yield from itertools.chain(range(half), [None], range(self.world_size - half, self.world_size))

    def __str__(self) -> str:
        return "·".join(f"{axis}{self.size(axis)}" for axis in DENSE_AXES if self.size(axis) > 1) or "one rank"


def describe_coordinates(coordinates: Mapping[Axis, int]) -> str:
    """Format coordinates for logs and errors, e.g. ``pp1 dp0 tp1``."""
    shown = (Axis.PP, Axis.DP, Axis.TP)
    return " ".join(f"{axis}{at}" for axis, at in coordinates.items() if axis in shown or (at and axis is Axis.CP))
