"""The reads of device values on the host while training: all of them, each by name.

A read blocks the host until the device has computed the value, and the device then idles until the host has issued more
work. The training step therefore reads nothing. Its results are packed into one tensor, whose copy to the host is
queued behind the step, and are read later (:class:`HostRead`).

Checkpoints, dumps, samples and the search for the origin of a non-finite value read whole tensors. They run between
steps, when no step is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from megastack.comm.backend import backend_of
from megastack.comm.transfers import start_copy_to_host

STEP = "step"
VALIDATION_STOP = "validation stop"
VALIDATION_LOSS = "validation loss"

HOST_READS: Mapping[str, str] = {
    STEP: "once per step, and once or twice at the start: loss, gradient norm, loss scale and what the ranks agreed on",
    VALIDATION_STOP: "once per batch of a validation: the request to stop",
    VALIDATION_LOSS: "once per validation",
}
"""Every read by name, and how often it occurs."""

_POLL_S = 0.01


class HostRead:
    """A tensor on its way to the host. Creating one does not block.

    Args:
        name: one of :data:`HOST_READS`.
        values: a tensor of one dimension; must not be modified afterwards.
    """

    def __init__(self, name: str, values: Tensor) -> None:
        assert name in HOST_READS, name
        self.name = name
        self._host, self._event = start_copy_to_host(values)

    def ready(self, within_s: float) -> bool:
        """Whether :meth:`values` would return without blocking, now or after at most ``within_s`` seconds."""
        deadline = time.monotonic() + within_s
        while self._event is not None and not self._event.query():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def values(self) -> list[float]:
        """The values; blocks until the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        values: list[float] = self._host.tolist()
        return values


def default_steps_ahead(device: torch.device) -> int:
    """How many steps a loop launches before it reads the results of the oldest: none where waiting blocks the host."""
    return 0 if backend_of(device).wait_blocks_host else 1
