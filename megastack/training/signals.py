"""Requests to stop early: signals and the time limit, which may reach any one rank, at any time.

A handler only sets a flag. At the end of each step the ranks agree (one small reduction, which carries the peak memory
as well), so that all of them stop after the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

TIME_IS_OVER = 999.0


class StopRequest:
    """This rank's wish to stop; a context in which signals are turned into it.

    Args:
        limit_s: seconds from now on after which the run stops; ``None`` for no limit.
        signals: what to listen to; handlers can be set in the main thread only, elsewhere none is.
    """

    def __init__(self, limit_s: float | None = None, signals: Sequence[signal.Signals] = ()) -> None:
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._signals = signals
        self._received: int | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._on_signal) for number in heeded(self._signals)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = self._received or number

    @property
    def code(self) -> float:
        """0 for none, the number of the signal, or :data:`TIME_IS_OVER`."""
        if self._received is not None:
            return float(self._received)
        over = self._deadline is not None and time.monotonic() >= self._deadline
        return TIME_IS_OVER if over else 0.0


def heeded(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    """Signals to listen to: all but SIGHUP where it is ignored, as ``nohup`` asks for."""
    return [number for number in signals if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def describe_stop(code: float) -> str:
    """A request that the ranks agreed on, for people."""
    return "the time limit is reached" if code == TIME_IS_OVER else f"received {signal.Signals(int(code)).name}"
