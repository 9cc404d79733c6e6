"""Signals that ask a run to stop, on the side of the launcher: passed on to the ranks, which save and return.

A rank gets the signal that came, so that its records say what was asked for.

The elastic agent would pass a signal on as well, but then it no longer listens: ranks that saved and returned would
wait for it until they are killed. Here it goes on listening, and the run ends as fast as the ranks do. Ranks that
outlast the grace are killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from megastack.observe.streams import write_stderr
from megastack.training.signals import handled_signals

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
REPEAT_S = 1.0


class StoppedEarly(Exception):
    """A signal to stop came before there was anything to pass it on to."""


class StopForwarder:
    """A context in which signals to stop go to the children that this process starts in it.

    A second SIGINT kills them at once. A signal that comes before there are children goes to the first that is found,
    and whoever starts them calls :meth:`check` before. SIGHUP stays ignored where it is, as under nohup.

    Args:
        grace_s: seconds from the signal to the end of patience.

    Attributes:
        received: the first signal.
        killed: whether ranks had to be killed.
    """

    def __init__(self, grace_s: float) -> None:
        self.received: signal.Signals | None = None
        self.killed = False
        self._grace_s = grace_s
        self._owner = os.getpid()
        self._impatient = self._over = False
        self._wake = threading.Event()
        self._others = {child.pid for child in multiprocessing.active_children()}
        self._thread: threading.Thread | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopForwarder:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._on_signal) for number in handled_signals(SIGNALS)}
        return self

    def check(self) -> None:
        """To be called immediately before the children are started.

        Raises:
            StoppedEarly: a signal came already.
        """
        if self.received is not None:
            raise StoppedEarly(f"received {self.received.name} before the ranks started")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a forked rank that has not yet set its own handlers; it is asked again
        name = signal.Signals(number)
        if self.received is not None:
            if number == signal.SIGINT:
                self._impatient = True
                self._wake.set()
            return
        self.received = name
        hint = " (a second SIGINT kills them)" if name is signal.SIGINT else ""
        write_stderr(f"{name.name}: the ranks finish their step, save and stop{hint}\n")
        self._thread = threading.Thread(target=self._press, args=(name,), daemon=True)
        self._thread.start()

    def _press(self, number: signal.Signals) -> None:
        """Ask until the run is over, for a rank may not have been listening; after the grace, kill."""
        deadline, ranks = time.monotonic() + self._grace_s, list[int]()
        while not (self._over or self.killed):
            ranks = ranks or self._children()
            self.killed = bool(ranks) and (self._impatient or time.monotonic() >= deadline)
            for pid in ranks:
                _send(pid, signal.SIGKILL if self.killed else number)
            self._wake.wait(REPEAT_S)

    def _children(self) -> list[int]:
        children = {child.pid for child in multiprocessing.active_children()} - self._others
        return [pid for pid in children if pid is not None]


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
