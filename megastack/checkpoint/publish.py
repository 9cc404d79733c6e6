"""Publish a checkpoint on disk, remove it, and recover from a crash in between.

A checkpoint is written into a hidden folder next to its final path and published with a single rename, so a folder with
its final name is complete. Only files that megastack writes are ever deleted: a folder with any other content is an
error or is not modified.

Replacing a checkpoint takes two renames: the old one becomes ``.step_….replaced``, the new one, ``.step_….writing``, is
renamed to the final name, and the old one is removed. If the process is killed between the renames, there is no
checkpoint with the final name, but there are two complete ones with hidden names. While ``.replaced`` exists, the
checkpoint is the first usable folder of the final one, the new one and the old one. :func:`locate` finds it;
:func:`recover` renames it back and removes the rest. A ``.writing`` folder without a ``.replaced`` folder was never
published and is removed. Recovery takes place at the next start or save of the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from megastack.checkpoint.integrity import checkpoint_error, list_names
from megastack.checkpoint.manifest import MANIFEST, RANK_FILE, REPORT_FILE, TRAINER
from megastack.errors import CheckpointError

LATEST = "latest"
Guard = Callable[[], None]
"""Raises if this run may no longer write; called by the rank that creates and publishes folders."""
_STEP_FOLDER = re.compile(r"step_([0-9]{8,})")
_HIDDEN = re.compile(r"\.(step_[0-9]{8,})\.(writing|replaced|removed)")


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint, e.g. ``step_00000010``."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in a folder name; ``None`` for any other name."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def writing_folder(path: Path) -> Path:
    """Return the folder into which the checkpoint at ``path`` is written before it is published."""
    return path.with_name(f".{path.name}.writing")


def replaced_folder(path: Path) -> Path:
    """Return the hidden name of the old checkpoint at ``path`` while the new one is published."""
    return path.with_name(f".{path.name}.replaced")


def removed_folder(path: Path) -> Path:
    """Return the hidden name of the checkpoint at ``path`` while it is removed."""
    return path.with_name(f".{path.name}.removed")


def make_writing_folder(path: Path, guard: Guard | None = None) -> None:
    """Create the empty folder into which the checkpoint at ``path`` will be written; called on one rank.

    Raises:
        CheckpointError: the path exists and is not a checkpoint.
        OSError: the folder cannot be created.
    """
    if guard is not None:
        guard()
    for folder in (path, writing_folder(path)):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise CheckpointError(f"{folder}: is not a folder; remove it or save elsewhere")
        if foreign := foreign_content(folder):
            raise CheckpointError(f"{folder}: is not a checkpoint, it holds {list_names(foreign, 4)}; save elsewhere")
    recover_one(path)
    writing_folder(path).mkdir(parents=True)


def publish(path: Path) -> None:
    """Rename the written checkpoint to its final name, then remove the checkpoint that it replaces.

    :func:`update_latest` flushes the rename.
    """
    written, replaced = writing_folder(path), replaced_folder(path)
    sync_folder(written)
    if path.exists():
        remove_folder(replaced)
        os.rename(path, replaced)
    try:
        os.rename(written, path)
    except OSError:
        if replaced.exists():
            os.rename(replaced, path)
        raise
    remove_folder(replaced)


def update_latest(path: Path) -> None:
    """Point ``latest`` to the published checkpoint next to it, and flush both renames to disk.

    Folders that are not named after a step have no such file. ``latest`` is only a hint, so it is not flushed
    separately: each flush waits for all pending disk writes.
    """
    if step_of(path) is not None:
        new = path.with_name(f".{LATEST}.{os.getpid()}")
        new.write_text(path.name + "\n", encoding="utf-8")
        os.replace(new, path.with_name(LATEST))
    sync_folder(path.parent)


def discard(path: Path, guard: Guard | None = None) -> None:
    """Remove the files of a checkpoint that will not be published, unless the guard raises."""
    if guard is not None:
        guard()
    remove_folder(writing_folder(path))


def remove_checkpoint(path: Path) -> bool:
    """Rename a published checkpoint to a hidden name, then delete it; return False if it contains foreign files."""
    hidden = removed_folder(path)
    if path.is_symlink() or foreign_content(path) or not remove_folder(hidden):
        return False
    os.rename(path, hidden)
    return remove_folder(hidden)


def remove_folder(folder: Path) -> bool:
    """Remove a folder that contains only checkpoint files; otherwise leave it unchanged and return False."""
    if not folder.exists():
        return True
    if folder.is_symlink() or not folder.is_dir() or foreign_content(folder):
        return False
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return True


def foreign_content(folder: Path) -> list[str]:
    """Return the names in a folder that are not files of a checkpoint."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or not _is_checkpoint_file(entry.name))


def step_folders(folder: Path) -> list[Path]:
    """Return the final paths of the checkpoints in a folder by increasing step, interrupted replacements included.

    This function only reads; :func:`locate` returns the current location of a checkpoint.
    """
    try:
        paths = list(folder.iterdir())
    except OSError:
        return []
    found = {path for path in paths if step_of(path) is not None and path.is_dir()}
    found |= {folder / name for name, kind in _hidden(paths) if kind == "replaced"}
    return sorted(found, key=lambda path: (step_of(path) or 0, path.name))


def locate(path: Path) -> Path:
    """Return the current location of the checkpoint ``path``: that path, or the hidden one to recover it from."""
    replaced, written = replaced_folder(path), writing_folder(path)
    if not replaced.is_dir() or replaced.is_symlink():
        return path
    options = [option for option in (path, written, replaced) if option.is_dir() and not option.is_symlink()]
    usable = (option for option in options if checkpoint_error(option) is None)
    return next(usable, path if path.is_dir() else replaced)


def recover(folder: Path) -> dict[Path, Path]:
    """Finish interrupted replacements in a ``checkpoints`` folder and remove leftovers; for the owning run only.

    Returns:
        The final path of each recovered checkpoint, by its hidden path.

    Raises:
        OSError: a folder cannot be renamed or removed.
    """
    recovered = {}
    if folder.is_dir():
        for name in sorted({name for name, _ in _hidden(list(folder.iterdir()))}):
            if (source := recover_one(folder / name)) is not None:
                recovered[source] = folder / name
    return recovered


def recover_one(path: Path) -> Path | None:
    """Recover a single checkpoint; return the hidden path that it was renamed from, ``None`` if it was not renamed.

    If this function is killed at any point, the next call finishes its work.
    """
    replaced, written, removed = replaced_folder(path), writing_folder(path), removed_folder(path)
    source = locate(path)
    remove_folder(removed)
    if source != path:
        if path.is_dir():
            os.rename(path, removed)  # this checkpoint is damaged, and another one is complete
        os.rename(source, path)
    for leftover in (replaced, written, removed):
        remove_folder(leftover)
    return source if source != path else None


def write_text(path: Path, text: str) -> int:
    """Write a new file and flush it to disk; return its size in bytes."""
    write_texts(path.parent, {path.name: text})
    return len(text.encode("utf-8"))


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write new files by name, then flush them all; the first flush makes the others cheap."""
    with ExitStack() as stack:
        files = [stack.enter_context(open(folder / name, "xb")) for name in texts]
        for file, text in zip(files, texts.values(), strict=True):
            file.write(text.encode("utf-8"))
            file.flush()
        for file in files:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_checkpoint_file(name: str) -> bool:
    return name in (MANIFEST, TRAINER) or any(kind.fullmatch(name) for kind in (RANK_FILE, REPORT_FILE))


def _hidden(paths: list[Path]) -> list[tuple[str, str]]:
    """Return the final name and the kind of each hidden folder."""
    return [(match[1], match[2]) for path in paths if (match := _HIDDEN.fullmatch(path.name))]
