"""Averages over ranks that have different keys."""

from __future__ import annotations

from megastack.comm.objects import average_by_key
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.ranks import run_ranks


def averages() -> tuple[dict[str, float], dict[str, float], int]:
    mesh = Mesh.from_environment(MeshShape(dp=3))
    values = ({"b": 4.0, "a": 1.0}, {"a": 3.0}, {})[mesh.rank]
    found = average_by_key(values, mesh.world)
    orders = average_by_key(({"x": 1.0, "y": 2.0}, {"y": 4.0, "x": 3.0}, {"z": 5.0})[mesh.rank], mesh.world)
    return found, orders, len(mesh.flight_recorder.operations)


def test_each_key_is_averaged_over_those_who_have_it_in_one_exchange() -> None:
    """Keys in another order do not mix; a rank without any takes part."""
    results = run_ranks(averages, 3)
    assert results == [({"a": 2.0, "b": 4.0}, {"x": 2.0, "y": 3.0, "z": 5.0}, 2)] * 3


def test_alone_nothing_is_exchanged() -> None:
    assert average_by_key({"b": 2.0, "a": 1.0}, Mesh.single().world) == {"a": 1.0, "b": 2.0}
