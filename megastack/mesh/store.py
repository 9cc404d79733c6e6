"""The store for the rendezvous of ranks: rank 0 listens at ``MASTER_ADDR:MASTER_PORT`` and the others connect.

Ranks compare their devices in it before they create process groups.

If the port is in use, torch's constructor raises an error with a C++ trace. If a listener accepts connections but is
not a store, torch's client waits without limit. Here both cases raise an error that names the variable, and no wait
exceeds the time-out.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from megastack.errors import MeshError, RankEnvironmentError
from megastack.mesh.device import DeviceDescription, find_device_error
from megastack.mesh.environment import RankEnvironment, agent_serves_store

RESOLVES_S = 20.0
"""Seconds to wait until the name of a machine, which may still be starting, appears in DNS."""
RETRY_S = 0.5
_DEVICE = "device"
"""Prefix of the keys under which ranks publish their devices."""


def open_store(launched: RankEnvironment, timeout_s: float) -> dist.TCPStore | None:
    """Open the store of a job, which rank 0 or torchrun's agent serves. Waits only for the server.

    Args:
        launched: the environment of this rank.
        timeout_s: seconds to wait for the store to answer, and later for any of its keys.

    Returns:
        The store; ``None`` if no store answered in time.

    Raises:
        RankEnvironmentError: ``MASTER_ADDR`` does not resolve, or rank 0 cannot listen or be reached there.
    """
    address, port = launched.require_endpoint()
    _resolve(address, min(timeout_s, RESOLVES_S))
    serves, limit = launched.rank == 0 and not agent_serves_store(), timedelta(seconds=timeout_s)
    made, raised = list[dist.TCPStore](), list[Exception]()

    def connect() -> None:
        try:
            store = dist.TCPStore(address, port, None, serves, limit, wait_for_workers=False, multi_tenant=True)
            made.append(store)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=connect, name="store", daemon=True)  # the constructor may never return
    thread.start()
    thread.join(timeout_s)
    if made:
        return made[0]
    if raised and not isinstance(raised[0], dist.DistError):
        raise raised[0]
    if not serves:
        return None
    raise _no_server(address, port, raised[0] if raised else None)


def check_devices(store: dist.Store, rank: int, world_size: int, device: DeviceDescription, timeout_s: float) -> None:
    """Compare the devices of all ranks; called on every rank, with the same result.

    NCCL reports a GPU that two ranks share only when it connects them, and ranks with different backends wait for each
    other.

    Args:
        store: shared by these ranks only.
        rank: this rank.
        world_size: the number of ranks.
        device: the device of this rank.
        timeout_s: how long a rank waits for the others.

    Raises:
        MeshError: two ranks have the same GPU, or devices of different kinds.
    """
    limit = timedelta(seconds=timeout_s)
    store.set(f"{_DEVICE}/{rank}", json.dumps(asdict(device)))
    if rank == 0:
        keys = [f"{_DEVICE}/{other}" for other in range(world_size)]
        store.wait(keys, limit)
        found = [DeviceDescription(**json.loads(store.get(key))) for key in keys]
        store.set(f"{_DEVICE}/error", find_device_error(found) or "")
    store.wait([f"{_DEVICE}/error"], limit)
    if error := store.get(f"{_DEVICE}/error").decode():
        raise MeshError(error)


def _resolve(address: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:  # a label that is empty or too long has no encoding
            if isinstance(error, UnicodeError) or time.monotonic() > deadline:
                why = getattr(error, "strerror", None) or "it is not a host name"
                raise RankEnvironmentError(
                    f"MASTER_ADDR={address}: cannot be resolved ({why}); use the host name or the address of the "
                    "machine of rank 0"
                ) from None
        time.sleep(RETRY_S)


def _no_server(address: str, port: int, error: Exception | None) -> RankEnvironmentError:
    """Explain torch's error on a rank 0 without a store."""
    text = str(error or "").partition("\n")[0]
    if "failed to listen" not in text:
        rule = f"rank 0 cannot reach itself there at port {port}; use the address of the machine of rank 0"
        return RankEnvironmentError(f"MASTER_ADDR={address}: {rule}")
    rule = f"port {port} of MASTER_ADDR={address} is in use"
    if "EADDRINUSE" not in text:
        rule = f"rank 0 cannot listen at port {port} of MASTER_ADDR={address} ({text.rpartition('message: ')[2]})"
    return RankEnvironmentError(f"MASTER_PORT={port}: {rule}; use another port")
