"""What a rank says when there is no store where its launcher says that one is."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from megastack.errors import RankEnvironmentError
from megastack.mesh import store
from megastack.mesh.environment import RankEnvironment
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which something listens that is not a store."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_port_in_use_is_named_by_the_rank_that_needs_it(taken: int, ranks: int) -> None:
    with pytest.raises(RankEnvironmentError) as caught:
        store.open_store(RankEnvironment(0, ranks, address="127.0.0.1", port=taken), 30)
    assert (
        str(caught.value) == f"MASTER_PORT={taken}: port {taken} of MASTER_ADDR=127.0.0.1 is in use; use another port"
    )


def test_a_listener_that_is_not_a_store_is_given_up_in_time(taken: int) -> None:
    """torch's own client would wait for it without a limit."""
    begin = time.monotonic()
    assert store.open_store(RankEnvironment(1, 2, address="127.0.0.1", port=taken), 0.5) is None
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("address", ["no.such.host.invalid", "a..b", "x" * 70])
def test_an_address_that_does_not_resolve(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "RESOLVES_S", 0.0)
    for rank in (0, 1):
        with pytest.raises(RankEnvironmentError, match=rf"^MASTER_ADDR={address}: cannot be resolved \(.+\); use "):
            store.open_store(RankEnvironment(rank, 2, address=address, port=20000), 30)


def test_a_mesh_reports_them_as_well(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RankEnvironmentError, match=f"port {taken} of MASTER_ADDR=127.0.0.1 is in use"):
        Mesh.from_environment(MeshShape(dp=2), device="cpu", timeout_s=30)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RankEnvironmentError, match=f"rank 0 could not be reached at 127.0.0.1:{taken} within 0.5 s"):
        Mesh.from_environment(MeshShape(dp=2), device="cpu", timeout_s=0.5)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(RankEnvironmentError, match=r"^RANK=2: must be less than WORLD_SIZE=2"):
        Mesh.from_environment(MeshShape(dp=2), device="cpu")
