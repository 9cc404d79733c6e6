"""Standard output and standard error that never raise, since a run must not fail because of its console output.

The reader of a pipe may exit (``megastack train | head -1``), the disk of standard output may be full, the terminal may
be gone or may lack a character. :class:`BestEffortStream` writes what it can: it discards everything after the first
failed write, and replaces characters that the encoding lacks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

PLAIN = {"×": "x", "·": "*", "…": "...", "–": "-", "→": "->"}
"""Replacements for characters in megastack's messages that an encoding lacks; others become a question mark."""


class BestEffortStream:
    """A wrapper of a text stream whose writes and flushes never raise.

    Args:
        stream: the stream; ``None``, the value of :data:`sys.stdout` if its descriptor was closed, discards everything.

    Attributes:
        error: the first error, after which nothing is written; ``None`` as long as writing succeeds.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        """Write ``text`` if the stream works."""
        try:
            self._attempt(lambda: self._stream.write(text))
        except UnicodeEncodeError:
            self._attempt(lambda: self._stream.write(_encodable(text, self._stream.encoding or "ascii")))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the buffer."""
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.error is not None:
            return
        try:
            action()
        except UnicodeEncodeError:
            raise
        except BlockingIOError:
            pass  # a non-blocking pipe is currently full
        except Exception as error:  # an OS error, a closed stream, or an error of a custom stream such as a notebook's
            self.error = error

    def release(self) -> None:
        """Redirect a failed stream to the null device, since its buffer would fail again at exit.

        Only the main program may call this.
        """
        self.flush()
        if self.error is None:
            return
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _encodable(text: str, encoding: str) -> str:
    """Replace the characters of ``text`` that an encoding lacks."""

    def shown(character: str) -> str:
        try:
            character.encode(encoding)
        except UnicodeEncodeError:
            return PLAIN.get(character, "?")
        return character

    return "".join(map(shown, text))


def standard_error() -> TextIO:
    """Return :data:`sys.stderr` as a stream that never raises."""
    return _protected(sys.stderr)


def standard_output() -> TextIO:
    """Return :data:`sys.stdout` as a stream that never raises."""
    return _protected(sys.stdout)


def _protected(stream: TextIO | None) -> TextIO:
    return cast(TextIO, stream if isinstance(stream, BestEffortStream) else BestEffortStream(stream))


@contextlib.contextmanager
def best_effort_output() -> Iterator[None]:
    """A context manager in which :data:`sys.stdout` and :data:`sys.stderr` never raise, for any writer.

    Starting or ending a process flushes both. Nested contexts have no effect.
    """
    previous = sys.stdout, sys.stderr
    protect_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = previous


def protect_output() -> None:
    """Like :func:`best_effort_output`, for the rest of the process.

    Closed descriptors 0 to 2 are opened on the null device. Otherwise, the next file or socket would reuse the number
    and receive the output of native code.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open returns the lowest free number, which is this one
    sys.stdout, sys.stderr = standard_output(), standard_error()


def release_output() -> str | None:
    """End the output of a command inside :func:`best_effort_output`.

    Returns:
        The reason why standard output is incomplete; ``None`` if it is complete or if the reader closed the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, BestEffortStream):
            stream.release()
    error = getattr(sys.stdout, "error", None)
    if not isinstance(error, OSError) or error.errno == errno.EPIPE:
        return None
    return error.strerror or str(error)


def write_stderr(text: str) -> None:
    """Write to the descriptor of standard error; safe in a signal handler, which may have interrupted another write."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode("ascii", "replace"))
