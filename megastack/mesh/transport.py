"""Which groups of a mesh on CPUs use shared memory, and which use gloo."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megastack.comm.shared_memory.connect import connect
from megastack.comm.shared_memory.group import SharedGroup
from megastack.comm.shared_memory.plan import GroupPlan
from megastack.errors import MeshError
from megastack.torch_private import timeout_of

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
    plans: Sequence[GroupPlan], rank: int, group: dist.ProcessGroup, transport: str
) -> tuple[list[SharedGroup | None], str]:
    """Set up shared memory for groups; called by all ranks of ``group``, which contains theirs.

    Args:
        plans: the groups.
        rank: this rank.
        group: the process group over which ranks find each other.
        transport: ``shared_memory``, or ``auto`` where groups that cannot share memory use gloo.

    Returns:
        The groups, None for those that use gloo, and a description for the log.

    Raises:
        MeshError: a group cannot share memory, and ``shared_memory`` is asked for.
    """

    def exchange(value: Any) -> Mapping[int, Any]:
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return dict(zip(dist.get_process_group_ranks(group), values, strict=True))

    found = connect(plans, rank, exchange, timeout_of(group).total_seconds())
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
