"""How a checkpoint appears and disappears on disk.

A checkpoint is written into a hidden sibling of its folder and published by one rename, so that a folder with its final
name is always whole. What a crash leaves behind is a hidden folder, which the next start or save of the run puts in
order (:mod:`megastack.checkpoint.recovery`). Only files that megastack writes are ever deleted: a folder that holds
anything else is refused or left alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

from megastack.checkpoint.manifest import MANIFEST, RANK_FILE, REPORT_FILE, TRAINER

LATEST = "latest"
Guard = Callable[[], None]
"""Raises where this run may no longer write; called by the rank that makes and publishes folders."""
_STEP_FOLDER = re.compile(r"step_([0-9]{8,})")


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint, ``step_00000010``."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a folder is named for; ``None`` for any other name."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def writing_folder(path: Path) -> Path:
    """Where the checkpoint at ``path`` is written before it is published."""
    return path.with_name(f".{path.name}.writing")


def replaced_folder(path: Path) -> Path:
    """Where a former checkpoint at ``path`` is until the new one has its name."""
    return path.with_name(f".{path.name}.replaced")


def removed_folder(path: Path) -> Path:
    """Where the checkpoint at ``path`` is while it is removed."""
    return path.with_name(f".{path.name}.removed")


def publish(path: Path) -> None:
    """Give the written checkpoint its name, in one rename; a former checkpoint of that name goes afterwards.

    :func:`note_latest` flushes the rename.
    """
    written, former = writing_folder(path), replaced_folder(path)
    sync_folder(written)
    if path.exists():
        remove(former)
        os.rename(path, former)
    try:
        os.rename(written, path)
    except OSError:
        if former.exists():
            os.rename(former, path)
        raise
    remove(former)


def note_latest(path: Path) -> None:
    """Point ``latest`` beside a published checkpoint to it, and flush both renames to disk.

    A folder that is not named for a step has no such file. What ``latest`` says is no more than a hint, so it is not
    flushed for itself: each flush waits for everything that the disk has to write.
    """
    if step_of(path) is not None:
        fresh = path.with_name(f".{LATEST}.{os.getpid()}")
        fresh.write_text(path.name + "\n", encoding="utf-8")
        os.replace(fresh, path.with_name(LATEST))
    sync_folder(path.parent)


def withdraw(path: Path, guard: Guard | None = None) -> None:
    """Remove what was written for a checkpoint that is not published; a run that may not write leaves it."""
    if guard is not None:
        guard()
    remove(writing_folder(path))


def retire(path: Path) -> bool:
    """Remove a published checkpoint, first from sight and then from disk; False where it holds foreign files."""
    hidden = removed_folder(path)
    if path.is_symlink() or foreign_content(path) or not remove(hidden):
        return False
    os.rename(path, hidden)
    return remove(hidden)


def remove(folder: Path) -> bool:
    """Remove a folder that holds nothing but files of a checkpoint; False where it holds more and so stays."""
    if not folder.exists():
        return True
    if folder.is_symlink() or not folder.is_dir() or foreign_content(folder):
        return False
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    return True


def foreign_content(folder: Path) -> list[str]:
    """The names in a folder that no checkpoint has."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() or not _is_ours(entry.name))


def write_text(path: Path, text: str) -> int:
    """Write a new file, flushed to disk; returns its size in bytes."""
    write_texts(path.parent, {path.name: text})
    return len(text.encode("utf-8"))


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write new files by name and flush them to disk; together, since the first flush brings the others along."""
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


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Some names for a message, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, TRAINER) or any(kind.fullmatch(name) for kind in (RANK_FILE, REPORT_FILE))
