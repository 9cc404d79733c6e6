"""Atomic writes: a file of a run is replaced or extended either completely or not at all, even on a full disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from megastack.records import RecordError, parse_record

_BLOCK = 1 << 16


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically.

    Raises:
        OSError: the write failed. The message names the file, which is unchanged; no temporary file remains.
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
    """A file of JSON lines; each line is appended completely or not at all.

    If the process is killed or the machine loses power, the file may end with a partial line or with null bytes. These
    are removed before the first append, so the next line is valid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._remove_partial_line()

    def append(self, line: str) -> None:
        """Append one line.

        Raises:
            OSError: the write failed. The message names the file, which is unchanged.
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

    def _remove_partial_line(self) -> None:
        begin, tail = self._after_last_line()
        if record_of(tail) is not None:
            self._file.write(b"\n")  # only the newline is missing
        elif tail:
            self._file.truncate(begin)

    def _after_last_line(self) -> tuple[int, bytes]:
        """Return the offset after the last complete line, and the bytes that follow."""
        tail, begin = b"", os.fstat(self._file.fileno()).st_size
        while begin and b"\n" not in tail:
            end, begin = begin, max(0, begin - _BLOCK)
            tail = os.pread(self._file.fileno(), end - begin, begin) + tail
        lines, newline, rest = tail.rpartition(b"\n")
        return begin + len(lines) + len(newline), rest


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the objects in a file of JSON lines; lines truncated by a crash or power loss are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    found = (record_of(line) for line in path.read_bytes().split(b"\n"))
    return [record for record in found if record is not None]


def record_of(text: bytes) -> dict[str, Any] | None:
    """Parse the JSON object in a text, ignoring surrounding null bytes; ``None`` if there is none."""
    try:
        return parse_record(text.strip(b"\0"))
    except RecordError:
        return None


class CannotWriteError(OSError):
    """A file cannot be written, for example on a full disk."""


def cannot_write(path: Path, error: OSError) -> CannotWriteError:
    """Return ``error`` with the name of the file, which write errors lack."""
    return CannotWriteError(error.errno, f"cannot write: {error.strerror}", str(path))
