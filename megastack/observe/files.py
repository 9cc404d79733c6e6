"""Files of a run that are written while it runs: whole or as they were before, also when the disk is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


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
    """A file to which whole lines are appended, each at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)

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


def cannot_write(path: Path, error: OSError) -> OSError:
    """``error`` with the name of the file that it is about, which writing does not tell."""
    return OSError(error.errno, f"cannot write: {error.strerror}", str(path))
