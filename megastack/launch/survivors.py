"""The processes of a run: how each ended, and the end of those that outlast a failure.

A rank that fails leaves an account, and the elastic agent asks the others to end. A stopped process does not hear
that, and the agent waits for a time of its own; here it is ``launch.grace_s``, whatever the agent does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import TracebackType

SEEKS_EVERY_S = 0.01
"""Ranks wait at the start line until all are forked, so all are still there a moment later."""
LOOKS_EVERY_S = 0.2


class SurvivorKiller:
    """A context that kills the processes started in it, ``grace_s`` after ``failed`` first says so.

    Args:
        ranks: how many processes will be started.
        failed: whether a rank has failed; asked often, on a thread.
        grace_s: how long the others have to end by themselves.

    Attributes:
        outlasted: the ranks that were killed.
    """

    def __init__(self, ranks: int, failed: Callable[[], bool], grace_s: float) -> None:
        self._count, self._failed, self._grace_s = ranks, failed, grace_s
        self._others = set(multiprocessing.active_children())
        self.outlasted: set[int] = set()
        self._ranks: list[BaseProcess] = []
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
        while not self._over.wait(LOOKS_EVERY_S if len(self._ranks) == self._count else SEEKS_EVERY_S):
            self._find()
            if self._failed():
                if not self._over.wait(self._grace_s):
                    self._kill()
                return

    def _find(self) -> None:
        """The processes in the order of their start, whose names are numbered; looked for until all are there.

        Whoever asks for living children reaps dead ones, on which the agent waits on the main thread, so it is not
        asked again.
        """
        if len(self._ranks) < self._count:
            found = set(multiprocessing.active_children()) - self._others
            self._ranks = sorted(found, key=lambda child: [int(number) for number in re.findall(r"\d+", child.name)])

    def _kill(self) -> None:
        for rank, child in enumerate(self._ranks):
            if child.pid is not None and child.is_alive():
                self.outlasted.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    def exit_codes(self) -> dict[int, int]:
        """How each rank ended, after the context; empty where they ended before all were seen."""
        codes = {rank: child.exitcode for rank, child in enumerate(self._ranks)}
        return {rank: code for rank, code in codes.items() if code is not None and len(codes) == self._count}
