"""Files of a run that are written while it runs: whole or as they were before, also when the disk is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from megastack.records import RecordError, parse_record

_BLOCK = 1 << 16


def replace_text(path: Path, text: str) -> None:
    """Replace a file at once; readers see all of it or what was there before.

    Raises:
        OSError: naming the file; the old one stays and nothing else is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise cannot_write(path, error) from error


class LineFile:
    """A file of JSON lines to which whole lines are appended, each at once.

    A process that is killed, or a machine that loses power, can leave a part of a line or null bytes at the end. They
    are removed before anything is appended, so that the next line stands by itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._remove_torn_line()

    def append(self, line: str) -> None:
        """Append one line.

        Raises:
            OSError: naming the file, which is as it was before.
        """
        rest, before = memoryview(f"{line}\n".encode()), os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            raise cannot_write(self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _remove_torn_line(self) -> None:
        begin, tail = self._after_last_line()
        if record_of(tail) is not None:
            self._file.write(b"\n")  # all but the end of the line was written
        elif tail:
            self._file.truncate(begin)

    def _after_last_line(self) -> tuple[int, bytes]:
        """Where the last whole line ends, and what follows it."""
        tail, begin = b"", os.fstat(self._file.fileno()).st_size
        while begin and b"\n" not in tail:
            end, begin = begin, max(0, begin - _BLOCK)
            tail = os.pread(self._file.fileno(), end - begin, begin) + tail
        lines, newline, rest = tail.rpartition(b"\n")
        return begin + len(lines) + len(newline), rest


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a line that a crash or a loss of power cut short is passed over.

    Raises:
        OSError: the file cannot be read.
    """
    found = (record_of(line) for line in path.read_bytes().split(b"\n"))
    return [record for record in found if record is not None]


def record_of(text: bytes) -> dict[str, Any] | None:
    """The JSON object that a text holds, between null bytes as a loss of power may leave them; ``None`` for others."""
    try:
        return parse_record(text.strip(b"\0"))
    except RecordError:
        return None


def cannot_write(path: Path, error: OSError) -> OSError:
    """``error`` with the name of the file that it is about, which writing does not tell."""
    return OSError(error.errno, f"cannot write: {error.strerror}", str(path))
