"""Detects that another rank ended, in the store of the job, while NCCL keeps waiting for it.

With gloo, the sockets of a process that ends are closed and its peers fail at once. With NCCL they wait until the
time-out. Every rank therefore renews a heartbeat key, and watches the key of the next rank. A rank that fails, or finds
that the next one is silent, sets a key that all ranks check. These are a few small requests for each rank and period,
whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist

HEARTBEAT_S = 2.0
SILENT_S = 20.0
"""A rank without a heartbeat for this time has ended. C code that holds Python's interpreter lock delays heartbeats."""
_LOST, _DONE = "megastack/lost", "done"


class PeerMonitor:
    """A context manager that renews the heartbeat of this rank and watches the next rank, on a thread.

    Args:
        store: shared by the ranks of the mesh; the monitor uses a clone.
        rank: this rank.
        world_size: the number of ranks.
        period_s: seconds between heartbeats.
        silent_s: seconds without a heartbeat after which a rank has ended.

    Attributes:
        lost: the rank that failed or ended first; None as long as there is none.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        period_s: float = HEARTBEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self.lost: int | None = None
        self._store, self._rank, self._next = cast(Any, store).clone(), rank, (rank + 1) % world_size
        self._store.set_timeout(timedelta(seconds=silent_s))
        self._period_s, self._silent_s = period_s, silent_s
        self._beats, self._seen, self._seen_at = 0, b"", time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    def __enter__(self) -> PeerMonitor:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(dist.DistError):
            if error is None:
                self._store.set(_heartbeat(self._rank), _DONE)
            else:
                self._store.set(_LOST, str(self._rank))

    def describe(self) -> str:
        """Describe the loss of a rank."""
        return f"rank {self.lost} ended or no longer responds"

    def _watch(self) -> None:
        while not self._stop.is_set() and self.lost is None:
            try:
                self._poll()
            except dist.DistError:  # rank 0, or the agent of its machine, serves the store
                self.lost = 0
            self._stop.wait(self._period_s)

    def _poll(self) -> None:
        self._beats += 1
        self._store.set(_heartbeat(self._rank), str(self._beats))
        if self._store.check([_LOST]):
            self.lost = int(self._store.get(_LOST))
            return
        now, key = time.monotonic(), _heartbeat(self._next)
        found = self._store.get(key) if self._store.check([key]) else b""
        if found != self._seen:
            self._seen, self._seen_at = found, now
        if now - self._seen_at > self._silent_s and found.decode() != _DONE:
            self._store.set(_LOST, str(self._next))
            self.lost = self._next


def _heartbeat(rank: int) -> str:
    return f"megastack/heartbeat/{rank}"
