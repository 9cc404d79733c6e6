"""The checkpoints of a run: list them, find the newest that is whole, decide where to resume, remove old ones.

Torch-free, so that a launcher can settle all of this before any rank starts. ``checkpoints/step_00000010`` is named for
the optimizer steps that are done; what is in it counts only if it is usable (:mod:`megastack.checkpoint.usable`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megastack.checkpoint.find import CHECKPOINTS, NoCheckpointError, find_checkpoint, is_imported
from megastack.checkpoint.manifest import MANIFEST
from megastack.checkpoint.publish import LATEST, listed, retire, step_of
from megastack.checkpoint.recovery import recover, standing, step_folders
from megastack.checkpoint.usable import Verified, checkpoint_error, in_a_line, soon
from megastack.errors import CheckpointError


@dataclass(frozen=True)
class Entry:
    """A folder named for a step, and what is wrong with it (``None``: nothing)."""

    path: Path
    step: int
    error: str | None

    @property
    def complete(self) -> bool:
        """Whether it can be resumed from, as far as was checked."""
        return self.error is None


@dataclass(frozen=True)
class Resume:
    """Where to start.

    Attributes:
        checkpoint: the folder to load; ``None`` to start fresh. It has a hidden name where a replacement was cut short,
            until the run that owns the folder recovers it.
        run_dir: the run folder to continue in; ``None`` to make a new one.
        skipped: faults of newer checkpoints that were passed over.
    """

    checkpoint: Path | None = None
    run_dir: Path | None = None
    skipped: tuple[str, ...] = ()


def list_checkpoints(folder: Path, *, content: bool = False) -> list[Entry]:
    """The checkpoints in a ``checkpoints`` folder, complete or not, by rising step; none where there is no folder."""
    paths = [path for path in step_folders(folder) if path.is_dir()]
    return [Entry(path, step_of(path) or 0, checkpoint_error(path, content=content)) for path in paths]


def newest_complete(folder: Path, *, content: bool = True) -> Path | None:
    """The whole checkpoint with the highest step, ``None`` where there is none."""
    newest_first = reversed([path for path in step_folders(folder) if path.is_dir()])
    return next((path for path in newest_first if checkpoint_error(path, content=content) is None), None)


def read_latest(folder: Path) -> Path | None:
    """What the file ``latest`` points to; ``None`` where there is no such file or folder."""
    try:
        name = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = folder / name
    return path if step_of(path) is not None and path.name == name and path.is_dir() else None


def resolve_resume(
    resume: str | None, run_dir: str | Path | None, root: str | Path, *, on_corrupt: str = "previous"
) -> Resume:
    """Decide what a run starts from; called once, by the launcher. Nothing is changed.

    Args:
        resume: ``None`` starts fresh, ``auto`` takes the newest complete checkpoint of ``run_dir`` if there is one,
            ``last`` the newest run under ``root``; anything else is a path, as :func:`find_checkpoint` takes it.
        run_dir: the run folder that was asked for, if any.
        root: the folder of all runs.
        on_corrupt: ``previous`` passes over damaged checkpoints (auto and last), ``refuse`` does not.

    Raises:
        CheckpointError: there is nothing to resume from where there must be, or a fresh run would mix with an old one.
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
    verified: Verified | None = None,
    limit_s: float | None = None,
) -> list[Path]:
    """Remove all but the newest ``count`` usable checkpoints, on one rank; returns the folders that are gone.

    A checkpoint counts if ``resume=auto`` would take it: its content is read unless ``verified`` knows it. Nothing is
    removed before ``count`` of them are found. Kept besides: steps that ``every`` divides, what ``latest`` points to,
    damaged checkpoints (they are not ours to judge), and folders that hold a file no checkpoint has.

    Args:
        folder: the ``checkpoints`` folder.
        count: how many stay.
        every: steps that this divides stay.
        upto: the last step of the run as it is; later ones are left over from before it went back. They neither count,
            since the run may not reach them again, nor are they removed.
        verified: files that need not be read.
        limit_s: how long to read; what could not be read by then does not count yet, so that more is kept.
    """
    if count < 1:
        raise CheckpointError(f"keep_last={count}: must be at least 1; use null to keep all")
    recover(folder)
    deadline, known = soon(limit_s), Verified() if verified is None else verified
    old = [path for path in reversed(step_folders(folder)) if upto is None or (step_of(path) or 0) <= upto]
    found = 0
    while old and found < count:
        found += checkpoint_error(old.pop(0), verified=known, deadline=deadline) is None
    latest = read_latest(folder)
    superfluous = [
        path
        for path in reversed(old)
        if not (every and (step_of(path) or 0) % every == 0)
        and path != latest
        and checkpoint_error(path, content=False, verified=known) is None
    ]
    return [path for path in superfluous if retire(path)]


def _fresh(run_dir: Path | None) -> Resume:
    if run_dir is not None and (found := step_folders(run_dir / CHECKPOINTS)):
        raise CheckpointError(
            f"resume=null: run.dir={run_dir} already holds checkpoints ({listed([path.name for path in found], 4)}); "
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
            f"resume=last: no checkpoint of the newest run {folder.parent} is usable ({in_a_line(*skipped)}); "
            "use the path of another one, or null"
        )
    return Resume(path, folder.parent, skipped)


def _named(path: Path) -> Resume:
    try:
        found = find_checkpoint(path, content=True)
    except NoCheckpointError as error:
        raise CheckpointError(f"resume={path}: {error.rule}; use {error.advice}, or null") from None
    if is_imported(found):
        rule = "is an import, which holds weights and nothing of a run to continue"
        raise CheckpointError(f"resume={path}: {rule}; use checkpoint.load_weights={path}")
    return Resume(found)


def _pick(folder: Path, on_corrupt: str) -> tuple[Path | None, tuple[str, ...]]:
    """The newest usable of a run's checkpoints and the faults of those passed over."""
    skipped: list[str] = []
    for path in reversed(step_folders(folder)):
        place = standing(path)
        error = checkpoint_error(place)
        if error is None:
            return place, tuple(skipped)
        if on_corrupt == "refuse":
            raise CheckpointError(
                f"checkpoint.on_corrupt=refuse: {path} is damaged ({in_a_line(error)}); "
                "use previous to resume from the one before it"
            )
        skipped.append(error)
    return None, tuple(skipped)


def _written_at(path: Path) -> int:
    """When a checkpoint was written, in ns; 0 where it has just been removed."""
    place = standing(path)
    for candidate in (place / MANIFEST, place):
        try:
            return candidate.stat().st_mtime_ns
        except OSError:
            continue
    return 0
