"""Requests to stop early: signals and the time limit, which may reach any one rank, at any time.

A handler only sets a flag. At the end of each step the ranks agree (one small reduction, which carries the peak memory
as well), so that all of them stop after the same step.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """This rank's wish to stop.

    Args:
        limit_s: seconds from now on after which the run stops; ``None`` for no limit.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._signal: int | None = None

    def install(self) -> None:
        """Turn SIGTERM and SIGUSR1 into requests; only the main thread of a process may."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    @property
    def code(self) -> float:
        """0 for none, the number of the signal, or 999 when the time is over."""
        if self._signal is not None:
            return float(self._signal)
        over = self._deadline is not None and time.monotonic() >= self._deadline
        return 999.0 if over else 0.0


def describe_stop(code: float) -> str:
    """A request that the ranks agreed on, for people."""
    return "the time limit is reached" if code == 999 else f"received {signal.Signals(int(code)).name}"
