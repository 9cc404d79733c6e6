"""Whether a checkpoint is usable: the check that resuming, retention and recovery share.

Reading every byte of a checkpoint is slow, so :class:`VerifiedFiles` remembers the files that this process has read or
written. An entry is valid as long as size, times and inode of the file are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
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

_Stamp = tuple[int, ...]
"""Size, times and inode of a file, with the size and crc32 recorded in its manifest."""


class VerifiedFiles:
    """Files that this process has written, or has compared with their manifests."""

    def __init__(self) -> None:
        self._stamps: dict[Path, _Stamp] = {}

    def add(self, path: Path) -> None:
        """Record the files of a checkpoint that was just written or loaded as verified."""
        try:
            for file in read_manifest(path).files.values():
                self._stamps[path / file.name] = _stamp(path / file.name, file)
        except (CheckpointError, OSError):
            pass  # it will be verified when it is checked

    def error(self, folder: Path, file: FileRecord, deadline: float | None = None) -> str | None:
        """Return an error that names the file if its size or content differs from the manifest, else ``None``.

        Raises:
            OutOfTimeError: the file could not be read before ``deadline`` (on the monotonic clock).
        """
        path = folder / file.name
        try:
            stamp = _stamp(path, file)
        except OSError:
            return file_error(folder, file)
        if self._stamps.get(path) == stamp:
            return None
        error = file_error(folder, file, deadline)
        if error is None:
            self._stamps[path] = stamp
        return error


def checkpoint_error(
    path: Path, *, content: bool = True, verified: VerifiedFiles | None = None, deadline: float | None = None
) -> str | None:
    """Check a checkpoint folder, and return an error that names the damaged files; ``None`` if it is usable.

    Args:
        path: the folder.
        content: whether to read every byte, or only the manifest, ``trainer.json`` and the sizes of the files.
        verified: files that need not be read again.
        deadline: on the monotonic clock; a file that has not been read by then is an error.
    """
    known = VerifiedFiles() if verified is None else verified
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


def join_lines(*errors: str) -> str:
    """Join errors into a single line of a message."""
    return "; ".join(line for error in errors for line in error.splitlines())


def list_names(names: Iterable[str], limit: int = 8) -> str:
    """Format the first few names for a message, with the number of remaining ones."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _stamp(path: Path, file: FileRecord) -> _Stamp:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, file.size, file.crc32
