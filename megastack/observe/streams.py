"""Standard output and standard error that never raise: the screen is optional, records and exit codes are not.

A reader may close its end of a pipe (``megastack train | head -1``), a disk behind standard output may fill up, a
terminal may be gone or may lack a character. :class:`BestEffortStream` writes what it can. After the first failed write
it discards the rest, and it replaces characters that the encoding of the stream does not have.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

PLAIN = {"×": "x", "·": "*", "…": "...", "–": "-", "→": "->"}
"""What stands for the characters of our own messages where the encoding has none; for others it is a question mark."""


class BestEffortStream:
    """A text stream on top of another one; it behaves like that one, but writing and flushing never raise.

    Args:
        stream: where to write; ``None``, as :data:`sys.stdout` is when its descriptor was closed, discards everything.

    Attributes:
        error: why nothing is written any more, ``None`` as long as writing works.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO = open(os.devnull, "w", encoding="utf-8") if stream is None else stream  # noqa: SIM115
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        """Write as much of ``text`` as the stream takes."""
        try:
            self._attempt(lambda: self._stream.write(text))
        except UnicodeEncodeError:
            self._attempt(lambda: self._stream.write(_encodable(text, self._stream.encoding or "ascii")))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.error is not None:
            return
        try:
            action()
        except UnicodeEncodeError:
            raise
        except BlockingIOError:
            pass  # a pipe in non-blocking mode is full for the moment
        except Exception as error:  # of the system, of a stream that was closed, of a notebook's own stream
            self.error = error

    def release(self) -> None:
        """Point the descriptor of a stream that failed at the null device: what it still buffers fails again at exit.

        To be called by the owner of the process only.
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
    """``text`` with the characters replaced that an encoding does not have."""

    def shown(character: str) -> str:
        try:
            character.encode(encoding)
        except UnicodeEncodeError:
            return PLAIN.get(character, "?")
        return character

    return "".join(map(shown, text))


def standard_error() -> TextIO:
    """:data:`sys.stderr` as a stream that never raises."""
    return _protected(sys.stderr)


def standard_output() -> TextIO:
    """:data:`sys.stdout` as a stream that never raises."""
    return _protected(sys.stdout)


def _protected(stream: TextIO | None) -> TextIO:
    return cast(TextIO, stream if isinstance(stream, BestEffortStream) else BestEffortStream(stream))


@contextlib.contextmanager
def best_effort_output() -> Iterator[None]:
    """A context in which :data:`sys.stdout` and :data:`sys.stderr` never raise, whoever writes to them.

    Starting a process flushes both, and so does the end of one. Nested contexts change nothing.
    """
    former = sys.stdout, sys.stderr
    protect_output()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = former


def protect_output() -> None:
    """Like :func:`best_effort_output` for the rest of a process, as a rank needs it.

    Closed descriptors 0 to 2 are opened on the null device. Else the next file or socket takes the number, and whatever
    native code prints ends up in it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
    sys.stdout, sys.stderr = standard_output(), standard_error()


def release_output() -> str | None:
    """End the output of a command inside :func:`best_effort_output`; why some of standard output was lost.

    ``None`` where everything was written, or where the reader closed the pipe and so wants no more.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, BestEffortStream):
            stream.release()
    error = getattr(sys.stdout, "error", None)
    if not isinstance(error, OSError) or error.errno == errno.EPIPE:
        return None
    return error.strerror or str(error)


def say_at_once(text: str) -> None:
    """Write to the descriptor of standard error, as a signal handler must that may have interrupted another write."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode("ascii", "replace"))
