"""Whether a checkpoint can be resumed from: the one judgement that resuming, retention and recovery share.

Reading every byte of a checkpoint takes long, so a :class:`Verified` remembers which files one process has read, or
written itself. What it remembers holds as long as size, times and inode of a file are the same.
"""

from __future__ import annotations

import time
from pathlib import Path

from megastack.checkpoint.manifest import (
    TRAINER,
    FileRecord,
    OutOfTimeError,
    file_error,
    read_manifest,
    read_trainer,
    size_errors,
)
from megastack.errors import CheckpointError

Mark = tuple[int, ...]


class Verified:
    """The files whose content one process has found to be what their manifests say, or has written itself."""

    def __init__(self) -> None:
        self._marks: dict[Path, Mark] = {}

    def trust(self, path: Path) -> None:
        """Take the files of a checkpoint as they are now for verified: it was written or loaded just now."""
        try:
            for file in read_manifest(path).files.values():
                self._marks[path / file.name] = _mark(path / file.name, file)
        except (CheckpointError, OSError):
            pass  # it is verified when it is asked about

    def error(self, folder: Path, file: FileRecord, deadline: float | None = None) -> str | None:
        """What is wrong with a file's size or content, naming it; ``None`` when it is what the manifest says.

        Raises:
            OutOfTimeError: it could not be read before ``deadline``, of the monotonic clock.
        """
        path = folder / file.name
        try:
            mark = _mark(path, file)
        except OSError:
            return file_error(folder, file)
        if self._marks.get(path) == mark:
            return None
        error = file_error(folder, file, deadline)
        if error is None:
            self._marks[path] = mark
        return error


def checkpoint_error(
    path: Path, *, content: bool = True, verified: Verified | None = None, deadline: float | None = None
) -> str | None:
    """What is wrong with a checkpoint folder, naming the damaged files; ``None`` when it can be resumed from.

    Args:
        path: the folder.
        content: read every byte; otherwise only the manifest, the trainer's state and the files' sizes are checked.
        verified: files that need not be read again.
        deadline: of the monotonic clock; what was not read by then counts as a fault.
    """
    known = Verified() if verified is None else verified
    try:
        manifest = read_manifest(path)
        if errors := size_errors(path, manifest):
            return "\n".join(errors)
        files = manifest.files.values() if content else [manifest.files[TRAINER]]
        if errors := [error for file in files if (error := known.error(path, file, deadline))]:
            return "\n".join(errors)
        read_trainer(path)
    except CheckpointError as error:
        return str(error)
    except OutOfTimeError:
        return f"{path}: not verified yet"
    return None


def in_a_line(*errors: str) -> str:
    """Faults for a message of one line."""
    return "; ".join(line for error in errors for line in error.splitlines())


def soon(seconds: float | None) -> float | None:
    """The deadline that is so many seconds away; ``None`` for no limit."""
    return None if seconds is None else time.monotonic() + seconds


def _mark(path: Path, file: FileRecord) -> Mark:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, file.size, file.crc32
