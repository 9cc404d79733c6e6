"""The checkpoints of a run: list them, resolve a path to one, decide where to resume, remove old ones.

This module does not import torch, so a launcher can use it before any rank starts. ``checkpoints/step_00000010`` is
named after the number of completed optimizer steps; it counts only if it is usable
(:mod:`megastack.checkpoint.integrity`). Every command and key that accepts a path finds its checkpoint with
:func:`find_checkpoint`, which only reads, so it is safe to use on the folder of a running job.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megastack.checkpoint.integrity import VerifiedFiles, checkpoint_error, join_lines, list_names
from megastack.checkpoint.manifest import MANIFEST, read_trainer
from megastack.checkpoint.publish import LATEST, locate, recover, remove_checkpoint, step_folders, step_of
from megastack.errors import CheckpointError

CHECKPOINTS = "checkpoints"
IMPORTED = "weights"
"""The subfolder of the checkpoint in an imported folder."""
RUN_CONFIG, HUB_CONFIG = "config.yaml", "config.json"
OTHER_CHECKPOINT = "the folder of another checkpoint or run"
_MOST_NAMES = 4


class NoCheckpointError(CheckpointError):
    """A path that does not lead to a usable checkpoint.

    Args:
        path: the path.
        found: a description of what was found there.
        advice: what to use instead.
    """

    def __init__(self, path: Path, found: str, advice: str = "the folder of a checkpoint or of a run") -> None:
        super().__init__(f"{path}: no usable checkpoint ({found}); use {advice}")
        self.rule = f"is not a usable checkpoint ({found})"
        self.advice = advice


@dataclass(frozen=True)
class CheckpointEntry:
    """A folder named after a step, and its error (``None`` if there is none)."""

    path: Path
    step: int
    error: str | None

    @property
    def complete(self) -> bool:
        """Whether the checkpoint is usable, as far as it was checked."""
        return self.error is None


@dataclass(frozen=True)
class Resume:
    """Where a run starts.

    Attributes:
        checkpoint: the folder to load; ``None`` to start fresh. If a replacement was interrupted, the folder has a
            hidden name until the run that owns it recovers the checkpoint.
        run_dir: the run folder to continue in; ``None`` to create a new one.
        skipped: errors of newer checkpoints that were skipped.
    """

    checkpoint: Path | None = None
    run_dir: Path | None = None
    skipped: tuple[str, ...] = ()


def find_checkpoint(path: Path, *, content: bool = False) -> Path:
    """Find the checkpoint that ``path`` refers to.

    Args:
        path: a checkpoint, a run folder, a ``checkpoints`` folder or an imported folder.
        content: whether to read every byte of the checkpoint.

    Raises:
        NoCheckpointError: there is none, or it is not usable; the message describes what was found.
    """
    chosen = _resolve(path)
    if error := checkpoint_error(chosen, content=content):
        usable = _newest_usable(chosen, content) if chosen != path else None
        advice = str(usable or OTHER_CHECKPOINT)
        raise NoCheckpointError(path, join_lines(error), advice)
    return chosen


@contextmanager
def damage_explained(checkpoint: Path) -> Iterator[None]:
    """Replace an error inside that was caused by damage: name the damaged files and the newest usable checkpoint.

    Every byte of the checkpoint is read, but only after an error.

    Raises:
        NoCheckpointError: there was an error, and the checkpoint is damaged.
    """
    try:
        yield
    except CheckpointError:
        if error := checkpoint_error(checkpoint):
            usable = _newest_usable(checkpoint, content=True)
            raise NoCheckpointError(checkpoint, join_lines(error), str(usable or OTHER_CHECKPOINT)) from None
        raise


def checkpoints_folder(path: Path) -> Path:
    """Return the ``checkpoints`` folder of a run folder; the path itself if it has none."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint by its name or content, even if damaged."""
    return (path / MANIFEST).is_file() or (path.is_dir() and step_of(path) is not None)


def is_imported(checkpoint: Path) -> bool:
    """Whether a checkpoint was imported and thus has weights but no run."""
    return "imported" in read_trainer(checkpoint)


def _resolve(path: Path) -> Path:
    """Return the checkpoint that a path refers to, usable or not."""
    if is_checkpoint(path):
        return path
    if not path.is_dir():
        raise NoCheckpointError(path, "is a file" if path.exists() else "no such folder")
    if found := step_folders(checkpoints_folder(path)):
        return locate(found[-1])
    if (path / IMPORTED / MANIFEST).is_file():
        return path / IMPORTED
    if (path / RUN_CONFIG).is_file():
        raise NoCheckpointError(path, "the run has written none", "checkpoint.at_end=true or checkpoint.every to train")
    if (path / HUB_CONFIG).is_file():
        raise NoCheckpointError(path, "a Hugging Face folder", f"the output of megastack import {path} --out DIR")
    inside = list_names(sorted(entry.name for entry in path.iterdir()), _MOST_NAMES)
    raise NoCheckpointError(path, f"it holds {inside}" if inside else "an empty folder")


def _newest_usable(chosen: Path, content: bool) -> Path | None:
    """Return the newest usable checkpoint in the same folder."""
    for path in reversed(step_folders(chosen.parent)):
        if checkpoint_error(place := locate(path), content=content) is None:
            return place
    return None


def list_checkpoints(folder: Path, *, content: bool = False) -> list[CheckpointEntry]:
    """List the checkpoints in a ``checkpoints`` folder by increasing step, complete or not; empty if it is missing."""
    paths = [path for path in step_folders(folder) if path.is_dir()]
    return [CheckpointEntry(path, step_of(path) or 0, checkpoint_error(path, content=content)) for path in paths]


def newest_complete(folder: Path, *, content: bool = True) -> Path | None:
    """Return the usable checkpoint with the highest step; ``None`` if there is none."""
    newest_first = reversed([path for path in step_folders(folder) if path.is_dir()])
    return next((path for path in newest_first if checkpoint_error(path, content=content) is None), None)


def read_latest(folder: Path) -> Path | None:
    """Return the checkpoint that the file ``latest`` names; ``None`` if the file or the folder does not exist."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = folder / name
    return path if step_of(path) is not None and path.name == name and path.is_dir() else None


def resolve_resume(
    resume: str | None, run_dir: str | Path | None, root: str | Path, *, on_corrupt: str = "previous"
) -> Resume:
    """Decide what a run starts from; called once, by the launcher. This function only reads.

    Args:
        resume: ``None`` starts fresh, ``auto`` resumes the newest usable checkpoint of ``run_dir`` if there is one,
            ``last`` does the same for the newest run under ``root``; anything else is a path for
            :func:`find_checkpoint`.
        run_dir: the requested run folder, if any.
        root: the folder of all runs.
        on_corrupt: ``previous`` skips damaged checkpoints (auto and last), ``refuse`` raises.

    Raises:
        CheckpointError: a required checkpoint does not exist, or a fresh run would mix with an old one.
    """
    if resume is None:
        return _fresh(None if run_dir is None else Path(run_dir))
    if resume == "auto":
        return _auto(run_dir, on_corrupt)
    if resume == "last":
        return _last(Path(root), on_corrupt)
    return _named(Path(resume))


def keep_last(
    folder: Path,
    count: int,
    *,
    every: int | None = None,
    upto: int | None = None,
    verified: VerifiedFiles | None = None,
    limit_s: float | None = None,
) -> list[Path]:
    """Remove all but the newest ``count`` usable checkpoints, on one rank, and return the removed folders.

    A checkpoint counts if ``resume=auto`` would accept it: its content is read unless ``verified`` contains it. Nothing
    is removed before ``count`` usable checkpoints are found. Multiples of ``every``, the checkpoint that ``latest``
    names, damaged checkpoints (for the user to inspect), and folders with foreign files are also kept.

    Args:
        folder: the ``checkpoints`` folder.
        count: how many checkpoints to keep.
        every: also keep steps that are multiples of this.
        upto: the run's current step. Later checkpoints were written before the run resumed from an older one; they do
            not count, since the run may not reach them again, and are not removed.
        verified: files that need not be read.
        limit_s: time limit for reading; a checkpoint that is not verified by then does not count, so more are kept.
    """
    if count < 1:
        raise CheckpointError(f"keep_last={count}: must be at least 1; use null to keep all")
    recover(folder)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    known = VerifiedFiles() if verified is None else verified
    old = [path for path in reversed(step_folders(folder)) if upto is None or (step_of(path) or 0) <= upto]
    found = 0
    while old and found < count:
        found += checkpoint_error(old.pop(0), verified=known, deadline=deadline) is None
    latest = read_latest(folder)
    removable = [
        path
        for path in reversed(old)
        if not (every and (step_of(path) or 0) % every == 0)
        and path != latest
        and checkpoint_error(path, content=False, verified=known) is None
    ]
    return [path for path in removable if remove_checkpoint(path)]


def _fresh(run_dir: Path | None) -> Resume:
    if run_dir is not None and (found := step_folders(run_dir / CHECKPOINTS)):
        names = list_names([path.name for path in found], _MOST_NAMES)
        raise CheckpointError(
            f"resume=null: run.dir={run_dir} already holds checkpoints ({names}); "
            "use resume=auto to continue, or another run.dir"
        )
    return Resume()


def _auto(run_dir: str | Path | None, on_corrupt: str) -> Resume:
    if run_dir is None:
        raise CheckpointError("resume=auto: needs a run folder; use run.dir=DIR, or resume=last")
    folder = Path(run_dir) / CHECKPOINTS
    path, skipped = _pick(folder, on_corrupt)
    return Resume(path, Path(run_dir), skipped)


def _last(root: Path, on_corrupt: str) -> Resume:
    found = [path for folder in root.rglob(CHECKPOINTS) for path in step_folders(folder)] if root.is_dir() else []
    if not found:
        raise CheckpointError(f"resume=last: there is no checkpoint under run.root={root}; use resume=null or a path")
    folder = max(found, key=lambda path: (_written_at(path), path.name)).parent
    path, skipped = _pick(folder, on_corrupt)
    if path is None:
        raise CheckpointError(
            f"resume=last: no checkpoint of the newest run {folder.parent} is usable ({join_lines(*skipped)}); "
            "use the path of another one, or null"
        )
    return Resume(path, folder.parent, skipped)


def _named(path: Path) -> Resume:
    try:
        found = find_checkpoint(path, content=True)
    except NoCheckpointError as error:
        raise CheckpointError(f"resume={path}: {error.rule}; use {error.advice}, or null") from None
    if is_imported(found):
        rule = "is an import, which holds weights but no run to continue"
        raise CheckpointError(f"resume={path}: {rule}; use checkpoint.load_weights={path}")
    return Resume(found)


def _pick(folder: Path, on_corrupt: str) -> tuple[Path | None, tuple[str, ...]]:
    """Return the newest usable checkpoint of a run, and the errors of newer ones."""
    skipped: list[str] = []
    for path in reversed(step_folders(folder)):
        place = locate(path)
        error = checkpoint_error(place)
        if error is None:
            return place, tuple(skipped)
        if on_corrupt == "refuse":
            raise CheckpointError(
                f"checkpoint.on_corrupt=refuse: {path} is damaged ({join_lines(error)}); "
                "use previous to resume from the one before it"
            )
        skipped.append(error)
    return None, tuple(skipped)


def _written_at(path: Path) -> int:
    """Return when a checkpoint was written, in ns; 0 if it has just been removed."""
    place = locate(path)
    for candidate in (place / MANIFEST, place):
        try:
            return candidate.stat().st_mtime_ns
        except OSError:
            continue
    return 0
