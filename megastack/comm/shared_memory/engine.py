"""Progress of a rank's operations: a rank that waits for one of them advances all that are outstanding.

Every wait sleeps on the one semaphore of its process. Another process posts it after writing a piece or reading some.
A thread advances the operations where a rank does something else while they are outstanding, such as a barrier of gloo
or a long computation. It starts with the first operation that is not complete at once, lasts as long as the process,
and otherwise looks four times a second whether there is work for it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

from megastack.comm.shared_memory import semaphores
from megastack.comm.shared_memory.memory import endpoint
from megastack.comm.shared_memory.operations import Operation

SPIN_S = 50e-6
"""How long a wait polls before it sleeps, if each rank has a core."""
CHECK_S = 0.25
"""How often a wait looks whether its peers still run."""
HELP_S = 0.02
"""How long operations may be outstanding before the thread advances them, and how often it does."""


class Line:
    """The operations on a ring or a set of rings, which are posted and taken in the order in which they started."""

    def __init__(self) -> None:
        self._posting: deque[Operation] = deque()
        self._taking: deque[Operation] = deque()

    def submit(self, operation: Operation) -> None:
        """Add an operation and post what there is room for."""
        engine().submit(self, operation)

    def add(self, operation: Operation) -> None:
        """Add an operation; only the engine calls it."""
        self._posting.append(operation)
        self._taking.append(operation)

    def advance(self) -> bool:
        """Post and take what is possible; true if nothing is outstanding."""
        self._post()
        taking = self._taking
        while taking:
            operation = taking[0]
            if not operation.take() or (self._posting and self._posting[0] is operation):
                break
            taking.popleft().finish()
            self._post()
        return not taking

    def _post(self) -> None:
        while self._posting and self._posting[0].post():
            self._posting.popleft()

    @property
    def is_posted(self) -> bool:
        """Whether all that was submitted has been written."""
        return not self._posting

    def absent(self) -> list[int]:
        """The members for which the oldest operation waits."""
        return self._taking[0].absent() if self._taking else []


class Engine:
    """All outstanding operations of this process.

    Attributes:
        processes: the most processes of this host with which this one communicates in a group, itself included.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.processes = 1
        self._bell = endpoint().bell
        self._cores = len(os.sched_getaffinity(0))
        self._lines: dict[Line, None] = {}
        self._lock = threading.RLock()
        self._waiting = 0
        self._helper: threading.Thread | None = None

    def submit(self, line: Line, operation: Operation) -> None:
        """Add an operation to a line, which is advanced now and in every wait until nothing is outstanding."""
        with self._lock:
            line.add(operation)
            if not line.advance():
                self._lines[line] = None
                if self._helper is None:
                    self._helper = threading.Thread(target=self._help, name="shared-memory", daemon=True)
                    self._helper.start()

    def wait(self, line: Line, operation: Operation, limit_s: float, failure: Failure) -> None:
        """Block until an operation of a line is done.

        Args:
            line: the line.
            operation: the operation.
            limit_s: seconds after which the wait fails.
            failure: describes why the pieces of the given members do not come.

        Raises:
            DistBackendError: a peer has ended, is late, or takes part in another operation.
        """
        self._advance(line)
        if operation.done:
            return
        self._waiting += 1
        try:
            self._wait(line, operation, limit_s, failure)
        finally:
            self._waiting -= 1

    def _wait(self, line: Line, operation: Operation, limit_s: float, failure: Failure) -> None:
        began = checked = time.monotonic()
        spins_until = began + SPIN_S if self.processes <= self._cores else began
        while True:
            self._advance()
            if operation.done:
                return
            if (now := time.monotonic()) < spins_until:
                continue
            semaphores.wait(self._bell, CHECK_S)
            while semaphores.take(self._bell):
                pass
            if now - checked >= CHECK_S:
                checked = now
                self._check(line, operation, failure, is_late=now - began > limit_s)

    def _check(self, line: Line, operation: Operation, failure: Failure, *, is_late: bool) -> None:
        """Raise if a wait cannot end."""
        with self._lock:
            text = failure(line.absent(), is_late)
        if text is None:
            return
        self._advance()  # with what a peer wrote before it ended
        if not operation.done:
            raise dist.DistBackendError(text)

    def _advance(self, first: Line | None = None) -> None:
        """Advance one line, or all that have outstanding operations."""
        with self._lock:
            for line in list(self._lines) if first is None else [first]:
                if line.advance():
                    self._lines.pop(line, None)

    def _help(self) -> None:
        """Advance what stays outstanding while no thread waits for it."""
        period = HELP_S
        while True:
            time.sleep(period)
            period = min(2 * period, CHECK_S)
            while self._lines and not self._waiting:
                period = HELP_S
                try:
                    self._advance()
                except dist.DistBackendError:  # the wait for the operation raises it
                    break
                if self._lines:
                    semaphores.wait(self._bell, CHECK_S)
            if self._waiting:
                semaphores.post(self._bell)  # it may have been taken from the thread that waits

    def forget(self) -> None:
        """Stop advancing what is outstanding."""
        with self._lock:
            self._lines.clear()

    def drain(self, limit_s: float) -> None:
        """Block until this process has written all that it has to write, for at most ``limit_s`` seconds."""
        until = time.monotonic() + limit_s
        while not all(line.is_posted for line in list(self._lines)) and time.monotonic() < until:
            self._advance()
            semaphores.wait(self._bell, HELP_S)


Failure = Callable[[list[int], bool], "str | None"]
"""Describes why the pieces of the given members do not come: they have ended, or, if asked, they are late."""

_engine: Engine | None = None


def engine() -> Engine:
    """The operations of this process; a forked child has its own."""
    global _engine
    if _engine is None or _engine.pid != os.getpid():
        _engine = Engine()
    return _engine


def drain(limit_s: float) -> None:
    """Block until this process has written what it started to send, for at most ``limit_s`` seconds."""
    if _engine is not None and _engine.pid == os.getpid():
        _engine.drain(limit_s)


atexit.register(drain, 5.0)
