"""Finish what a crash cut short, so that a checkpoint that was there stays there.

Replacing a checkpoint takes two renames: the former one goes to ``.step_….replaced``, the new one comes from
``.step_….writing``, and then the former one is removed. A process that is killed between them leaves no checkpoint of
that name, but two whole ones under hidden names. While ``.replaced`` is there, the checkpoint of that name is the first
usable one of the name itself, the new and the former: :func:`standing` says which, :func:`recover` gives it the name
and removes the rest. A ``.writing`` without a ``.replaced`` was never published, and is removed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from megastack.checkpoint.publish import (
    Guard,
    foreign_content,
    remove,
    removed_folder,
    replaced_folder,
    step_of,
    writing_folder,
)
from megastack.checkpoint.usable import checkpoint_error
from megastack.errors import CheckpointError

_HIDDEN = re.compile(r"\.(step_[0-9]{8,})\.(writing|replaced|removed)")


def step_folders(folder: Path) -> list[Path]:
    """The checkpoints of a folder by rising step, under their final names, those whose replacement was cut short too.

    Nothing is changed; :func:`standing` says where one of them is.
    """
    try:
        paths = list(folder.iterdir())
    except OSError:
        return []
    found = {path for path in paths if step_of(path) is not None and path.is_dir()}
    found |= {folder / name for name, kind in _hidden(paths) if kind == "replaced"}
    return sorted(found, key=lambda path: (step_of(path) or 0, path.name))


def standing(path: Path) -> Path:
    """Where the checkpoint called ``path`` is: there, or under the hidden name that recovery will take it from."""
    former, written = replaced_folder(path), writing_folder(path)
    if not former.is_dir() or former.is_symlink():
        return path
    options = [option for option in (path, written, former) if option.is_dir() and not option.is_symlink()]
    usable = (option for option in options if checkpoint_error(option) is None)
    return next(usable, path if path.is_dir() else former)


def recover(folder: Path) -> dict[Path, Path]:
    """Finish interrupted replacements in a ``checkpoints`` folder and remove leftovers; only its owner calls.

    Returns:
        The checkpoints that got their name back, by the hidden name that they had.

    Raises:
        OSError: something cannot be renamed or removed.
    """
    adopted = {}
    if folder.is_dir():
        for name in sorted({name for name, _ in _hidden(list(folder.iterdir()))}):
            if (source := recover_one(folder / name)) is not None:
                adopted[source] = folder / name
    return adopted


def recover_one(path: Path) -> Path | None:
    """The same for one checkpoint; the hidden name that it was adopted from, if it was.

    A kill at any point of this leaves what the next call finishes.
    """
    former, written, removed = replaced_folder(path), writing_folder(path), removed_folder(path)
    source = standing(path)
    remove(removed)
    if source != path:
        if path.is_dir():
            os.rename(path, removed)  # damaged, and there is a whole one
        os.rename(source, path)
    for leftover in (former, written, removed):
        remove(leftover)
    return source if source != path else None


def begin(path: Path, guard: Guard | None = None) -> None:
    """Make the empty folder in which the checkpoint at ``path`` will be written; one rank calls.

    Raises:
        CheckpointError: something that is not a checkpoint is in the way.
        OSError: the folder cannot be made.
    """
    if guard is not None:
        guard()
    for folder in (path, writing_folder(path)):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise CheckpointError(f"{folder}: is no folder; remove it or save elsewhere")
        if strangers := foreign_content(folder):
            raise CheckpointError(
                f"{folder}: holds {', '.join(strangers[:4])}, which is not a checkpoint; save elsewhere"
            )
    recover_one(path)
    writing_folder(path).mkdir(parents=True)


def _hidden(paths: list[Path]) -> list[tuple[str, str]]:
    """The name and kind of each hidden folder."""
    return [(match[1], match[2]) for path in paths if (match := _HIDDEN.fullmatch(path.name))]
