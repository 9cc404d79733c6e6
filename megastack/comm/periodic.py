"""A daemon thread that calls a function periodically, beside the work of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PeriodicThread:
    """Calls ``call`` at once and then after every ``period_s`` seconds, from :meth:`start` to :meth:`stop`."""

    def __init__(self, name: str, period_s: float, call: Callable[[], object]) -> None:
        self._period_s, self._call = period_s, call
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current call, and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._call()
            self._stop.wait(self._period_s)
