"""Where ranks are that do not return: in a wait for another rank, or in work of their own.

A rank that is blocked in the transport runs no Python code, so it cannot answer a question. ``faulthandler`` writes the
stack of its main thread from a signal handler in C, which works there as well. A stopped process writes nothing.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megastack.comm.peer_failure import is_transport

SIGNAL = signal.SIGUSR2
ANSWERS_WITHIN_S = 2.0
_FRAME = re.compile(r'File "(.*)", line (\d+) in (\S+)\n')


@dataclass(frozen=True)
class Stuck:
    """A rank that did not return.

    Attributes:
        rank: the rank.
        place: its innermost Python call, or ``None`` if it did not answer.
        waits: whether that call waits for other ranks.
    """

    rank: int
    place: str | None
    waits: bool

    def __str__(self) -> str:
        if self.place is None:
            return f"rank {self.rank} does not respond, as when it is stopped"
        return f"rank {self.rank} {'waits for other ranks' if self.waits else 'is'} at {self.place}"


@contextmanager
def answering(folder: Path, rank: int) -> Iterator[None]:
    """While this process writes where its main thread is when :func:`locate` asks for it."""
    with _path(folder, rank).open("w", encoding="utf-8") as file:
        faulthandler.register(SIGNAL, file=file, all_threads=False)
        try:
            yield
        finally:
            faulthandler.unregister(SIGNAL)


def locate(folder: Path, pids: Mapping[int, int]) -> list[Stuck]:
    """Ask processes, by rank, where they are."""
    for pid in pids.values():
        with suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)
    deadline = time.monotonic() + ANSWERS_WITHIN_S
    while not all(_FRAME.search(_read(folder, rank)) for rank in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [_stuck(rank, _read(folder, rank)) for rank in pids]


def _stuck(rank: int, stack: str) -> Stuck:
    """What a stack says, the innermost call of which comes first."""
    frames = [(file, name, line) for file, line, name in _FRAME.findall(stack)]
    if not frames:
        return Stuck(rank, None, waits=False)
    file, name, line = frames[0]
    return Stuck(rank, f"{file}:{line} in {name}", is_transport([(file, name) for file, name, _ in reversed(frames)]))


def _read(folder: Path, rank: int) -> str:
    path = _path(folder, rank)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _path(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank}"
