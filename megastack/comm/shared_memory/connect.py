"""The start of communication through shared memory: each rank reserves memory and maps the memory of its peers.

:func:`connect` is called once for the groups of a mesh, by all its ranks. Each rank reserves memory with one ring per
group, which all other members read, and for pipelines one ring per peer. The ranks exchange where their memory is, map
it, and agree for each group whether all members could.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megastack.comm.group import AxisGroup
from megastack.comm.objects import all_gather_objects
from megastack.comm.shared_memory import semaphores
from megastack.comm.shared_memory.engine import engine
from megastack.comm.shared_memory.group import SharedGroup
from megastack.comm.shared_memory.memory import Offer, OwnMemory, Peer, endpoint
from megastack.comm.shared_memory.plan import PAGE, GroupPlan, reserved_bytes
from megastack.comm.shared_memory.rings import initialise
from megastack.errors import MeshError


@dataclass(frozen=True)
class Offers:
    """Where the peers of a rank find its endpoint and its memory."""

    endpoint: Offer
    memory: Offer


_open: weakref.WeakSet[OwnMemory] = weakref.WeakSet()


def close_shared_memory() -> None:
    """End the use of all groups of this process: peers that wait for it fail."""
    if not _open:
        return
    engine().forget()
    for own in list(_open):
        own.close()


TRANSPORTS = ("auto", "shared_memory", "gloo")
TRANSPORT_VARIABLE = "MEGASTACK_CPU_TRANSPORT"
"""The environment variable that replaces ``auto``."""


def requested_transport(key: str) -> str:
    """The transport that is asked for: the key, or for ``auto`` the environment variable.

    Raises:
        MeshError: it is unknown.
    """
    name, value = (
        ("cpu_transport", key) if key != "auto" else (TRANSPORT_VARIABLE, os.environ.get(TRANSPORT_VARIABLE, key))
    )
    if value not in TRANSPORTS:
        raise MeshError(f"{name}={value}: must be one of {', '.join(TRANSPORTS)}")
    return value


def share_memory(
    plans: Sequence[GroupPlan], rank: int, members: AxisGroup, transport: str, timeout_s: float
) -> tuple[list[SharedGroup | None], str]:
    """Set up shared memory for groups; called by all ``members``, which contain theirs.

    Args:
        plans: the groups of this rank, with the same sizes on every rank.
        rank: this rank.
        members: over which the ranks find each other.
        transport: ``shared_memory``, or ``auto`` where groups that cannot share memory use gloo.
        timeout_s: seconds after which a wait fails.

    Returns:
        The groups, None for those that use gloo, and a description for the log.

    Raises:
        MeshError: a group cannot share memory, and ``shared_memory`` is asked for.
    """

    def exchange(value: Any) -> Mapping[int, Any]:
        return dict(zip(members.ranks, all_gather_objects(value, members), strict=True))

    found = connect(plans, rank, exchange, timeout_s)
    reasons = {plan.axis: each for plan, each in zip(plans, found, strict=True) if isinstance(each, str)}
    if reasons and transport == "shared_memory":
        raise MeshError(
            f"launch.cpu_transport=shared_memory: {'; '.join(f'{axis}: {text}' for axis, text in reasons.items())}; "
            "use auto or gloo"
        )
    shared = [each if isinstance(each, SharedGroup) else None for each in found]
    names = ", ".join(plan.axis for plan, each in zip(plans, shared, strict=True) if each is not None)
    parts = [f"shared memory for {names}"] if names else []
    parts += [f"gloo for {axis} ({text})" for axis, text in reasons.items()]
    return shared, "; ".join(parts)


def connect(
    groups: Sequence[GroupPlan], rank: int, exchange: Callable[[Any], Mapping[int, Any]], timeout_s: float
) -> list[SharedGroup | str]:
    """Set up groups of this rank; called by all ranks that ``exchange`` reaches, with groups of the same sizes.

    Args:
        groups: with at least two members each.
        rank: this rank.
        exchange: returns the value of every rank, by rank.
        timeout_s: seconds after which a wait fails.

    Returns:
        For each group this rank's access to it, or why a member cannot use shared memory.
    """
    own, mine = _reserve(groups)
    offers = exchange(mine)
    peers = {r: _peer(offers[r]) for r in sorted({r for plan in groups for r in plan.ranks} - {rank})}
    votes = exchange([_reason(rank, plan, offers, peers) for plan in groups])
    if own is not None:
        own.seal()
    found: list[SharedGroup | str] = []
    offset = PAGE
    for i, plan in enumerate(groups):
        reason = next((votes[r][i] for r in plan.ranks if votes[r][i]), None)
        if reason is not None or own is None:
            found.append(reason or str(mine))
        else:
            theirs = {r: peer for r in plan.ranks if isinstance(peer := peers.get(r), Peer)}
            found.append(SharedGroup(plan, rank, own, theirs, offset, timeout_s))
            engine().processes = max(engine().processes, len(plan.ranks))
        offset += plan.size
    return found


def _reserve(groups: Sequence[GroupPlan]) -> tuple[OwnMemory | None, Offers | str]:
    """The memory of this rank and where it is, or why there is none."""
    if not semaphores.AVAILABLE:
        return None, "the C library has no semaphores for several processes"
    try:
        own = OwnMemory("megastack", reserved_bytes(groups))
        offers = Offers(endpoint().offer(), own.offer())
    except OSError as error:
        return None, f"memory cannot be shared: {error}"
    offset = PAGE
    for plan in groups:
        ring, messages = plan.layouts(offset)
        for each in (ring, *messages):
            initialise(each, own)
        offset += plan.size
    _open.add(own)
    return own, offers


def _peer(offer: Offers | str) -> Peer | str:
    """Another rank's memory, or why it is out of reach."""
    try:
        return offer if isinstance(offer, str) else Peer.find(offer.endpoint, offer.memory)
    except OSError as error:
        return f"its memory cannot be mapped: {error}"


def _reason(
    rank: int, plan: GroupPlan, offers: Mapping[int, Offers | str], peers: Mapping[int, Peer | str]
) -> str | None:
    """Why a group cannot use shared memory, as far as this rank knows; None if it can."""
    for other in plan.ranks:
        offer, peer = offers[other], peers.get(other)
        if isinstance(offer, str):
            return f"rank {other}: {offer}"
        if isinstance(peer, str):
            return f"ranks {rank} and {other}: {peer}"
    return None
