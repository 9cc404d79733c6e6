"""Which checkpoint a path means: that folder, the newest of a run or a ``checkpoints`` folder, or an import's weights.

The same for every command and key that takes a path. It only reads, so it may look into the folder of a live run.
"""

from __future__ import annotations

from pathlib import Path

from megastack.checkpoint.manifest import MANIFEST, read_trainer
from megastack.checkpoint.publish import listed, step_of
from megastack.checkpoint.recovery import standing, step_folders
from megastack.checkpoint.usable import checkpoint_error, in_a_line
from megastack.errors import CheckpointError

CHECKPOINTS = "checkpoints"
IMPORTED = "weights"
"""Where an import keeps its checkpoint."""
RUN_CONFIG, HUB_CONFIG = "config.yaml", "config.json"
_SHOWN = 4


class NoCheckpointError(CheckpointError):
    """A path that does not lead to a usable checkpoint.

    Args:
        path: the path.
        found: what was found there.
        advice: what to use instead.
    """

    def __init__(self, path: Path, found: str, advice: str = "the folder of a checkpoint or of a run") -> None:
        super().__init__(f"{path}: no checkpoint that can be used ({found}); use {advice}")
        self.rule = f"is not a usable checkpoint ({found})"
        self.advice = advice


def find_checkpoint(path: Path, *, content: bool = False) -> Path:
    """The checkpoint that ``path`` means.

    Args:
        path: a checkpoint, a run folder, a ``checkpoints`` folder or an imported folder.
        content: read every byte of the checkpoint.

    Raises:
        NoCheckpointError: there is none, or the one that is meant is not usable; with what was found.
    """
    chosen = _meant(path)
    if error := checkpoint_error(chosen, content=content):
        usable = _newest_usable(chosen, content) if chosen != path else None
        advice = str(usable or "the folder of another checkpoint or run")
        raise NoCheckpointError(path, in_a_line(error), advice)
    return chosen


def checkpoints_folder(path: Path) -> Path:
    """The ``checkpoints`` folder that a path names: a run's, or the folder itself."""
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a checkpoint by its name or content, damaged or not."""
    return (path / MANIFEST).is_file() or (path.is_dir() and step_of(path) is not None)


def is_imported(checkpoint: Path) -> bool:
    """Whether a checkpoint comes from an import: weights without a run."""
    return "imported" in read_trainer(checkpoint)


def _meant(path: Path) -> Path:
    """The checkpoint that a path means, whole or not."""
    if is_checkpoint(path):
        return path
    if not path.is_dir():
        raise NoCheckpointError(path, "is a file" if path.exists() else "no such folder")
    if found := step_folders(checkpoints_folder(path)):
        return standing(found[-1])
    if (path / IMPORTED / MANIFEST).is_file():
        return path / IMPORTED
    if (path / RUN_CONFIG).is_file():
        raise NoCheckpointError(path, "the run has written none", "checkpoint.at_end=true or checkpoint.every to train")
    if (path / HUB_CONFIG).is_file():
        raise NoCheckpointError(path, "a Hugging Face folder", f"what megastack import {path} --out DIR makes")
    inside = listed(sorted(entry.name for entry in path.iterdir()), _SHOWN)
    raise NoCheckpointError(path, f"it holds {inside}" if inside else "an empty folder")


def _newest_usable(chosen: Path, content: bool) -> Path | None:
    """The newest of its neighbours that is whole."""
    for path in reversed(step_folders(chosen.parent)):
        if checkpoint_error(place := standing(path), content=content) is None:
            return place
    return None
