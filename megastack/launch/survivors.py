"""The end of ranks that outlast a failure.

A rank that fails leaves an account, and the elastic agent asks the others to end. A stopped process does not hear
that, and the agent waits for a time of its own; here it is ``launch.grace_s``, whatever the agent does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType

LOOKS_EVERY_S = 0.2


class SurvivorKiller:
    """A context that kills the processes started in it, ``grace_s`` after ``failed`` first says so.

    Args:
        failed: whether a rank has failed; asked often, on a thread.
        grace_s: how long the others have to end by themselves.
    """

    def __init__(self, failed: Callable[[], bool], grace_s: float) -> None:
        self._failed, self._grace_s = failed, grace_s
        self._others = {child.pid for child in multiprocessing.active_children()}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="survivors", daemon=True)

    def __enter__(self) -> SurvivorKiller:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOKS_EVERY_S):
            if self._failed():
                if not self._over.wait(self._grace_s):
                    self._kill()
                return

    def _kill(self) -> None:
        for child in multiprocessing.active_children():
            if child.pid is not None and child.pid not in self._others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
