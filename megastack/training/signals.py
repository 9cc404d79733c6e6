"""Requests to stop early: signals and the time limit, which may reach any rank at any time.

A signal handler only sets a flag. At the end of each step the ranks agree in one small reduction, which also carries
the peak memory, so that all of them stop after the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

Handler = Callable[[int, FrameType | None], object] | int | None
TIME_LIMIT = 999.0
"""The code of a stop request for the time limit; above every signal number."""


class StopRequest:
    """A request of this rank to stop; as a context manager it installs signal handlers.

    Args:
        limit_s: seconds from now after which the run stops; ``None`` for no limit.
        signals: the signals to handle; only the main thread can install handlers, other threads install none.
    """

    def __init__(self, limit_s: float | None = None, signals: Sequence[signal.Signals] = ()) -> None:
        self._deadline = None if limit_s is None else time.monotonic() + limit_s
        self._signals = signals
        self._received: int | None = None
        self._former: dict[signal.Signals, Handler] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._on_signal) for number in handled_signals(self._signals)}
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
        """0 for no request, the signal number, or :data:`TIME_LIMIT`."""
        if self._received is not None:
            return float(self._received)
        expired = self._deadline is not None and time.monotonic() >= self._deadline
        return TIME_LIMIT if expired else 0.0


def handled_signals(signals: Sequence[signal.Signals]) -> list[signal.Signals]:
    """The signals to handle: all of them, except SIGHUP where it is ignored (``nohup``)."""
    return [number for number in signals if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def describe_stop(code: float) -> str:
    """A description of the stop request that the ranks agreed on."""
    return "the time limit is reached" if code == TIME_LIMIT else f"received {signal.Signals(int(code)).name}"
