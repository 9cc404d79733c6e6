"""The checkpoints of a run: list them, find the newest that is whole, decide where to resume, remove old ones.

Torch-free, so that a launcher can settle all of this before any rank starts. ``checkpoints/step_00000010`` is named for
the optimizer steps that are done; what is in it counts only if its manifest is there and its files are what that says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megastack.checkpoint.manifest import MANIFEST, file_fault, read_manifest, size_faults
from megastack.checkpoint.publish import LATEST, listed, remove_leftovers, retire, step_of
from megastack.errors import CheckpointError

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Entry:
    """A folder named for a step, and what is wrong with it (``None``: nothing)."""

    path: Path
    step: int
    fault: str | None

    @property
    def complete(self) -> bool:
        """Whether it can be resumed from, as far as was checked."""
        return self.fault is None


@dataclass(frozen=True)
class Resume:
    """Where to start.

    Attributes:
        checkpoint: the folder to load; ``None`` to start fresh.
        run_dir: the run folder to continue in; ``None`` to make a new one.
        skipped: faults of newer checkpoints that were passed over.
    """

    checkpoint: Path | None = None
    run_dir: Path | None = None
    skipped: tuple[str, ...] = ()


def checkpoint_fault(path: Path, *, content: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, naming the damaged files; ``None`` when it is whole.

    Args:
        path: the folder.
        content: read every byte; otherwise only the manifest and the sizes of the files are checked.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return str(error)
    faults = size_faults(path, manifest)
    if content and not faults:
        faults = [fault for file in manifest.files.values() if (fault := file_fault(path, file))]
    return "\n".join(faults) or None


def list_checkpoints(folder: Path, *, content: bool = False) -> list[Entry]:
    """The checkpoints in a ``checkpoints`` folder, complete or not, by rising step; none where there is no folder."""
    paths = _step_folders(folder)
    return [Entry(path, step_of(path) or 0, checkpoint_fault(path, content=content)) for path in paths]


def newest_complete(folder: Path, *, content: bool = True) -> Path | None:
    """The whole checkpoint with the highest step, ``None`` where there is none."""
    return _pick(folder, "previous", content)[0]


def read_latest(folder: Path) -> Path | None:
    """What the file ``latest`` points to; ``None`` where there is no such file or folder."""
    try:
        path = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return path if step_of(path) is not None and path.is_dir() else None


def resolve_resume(
    resume: str | None, run_dir: str | Path | None, root: str | Path, *, on_corrupt: str = "previous"
) -> Resume:
    """Decide what a run starts from; called once, by the launcher.

    Args:
        resume: ``None`` starts fresh, ``auto`` takes the newest complete checkpoint of ``run_dir`` if there is one,
            ``last`` the newest run under ``root``; anything else is the path of a checkpoint.
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


def keep_last(folder: Path, count: int, *, every: int | None = None) -> list[Path]:
    """Remove all but the newest ``count`` complete checkpoints, on one rank; returns the folders that are gone.

    Kept besides: steps that ``every`` divides, what ``latest`` points to, incomplete checkpoints (they are not ours to
    judge), and folders that hold a file no checkpoint has.
    """
    if count < 1:
        raise CheckpointError(f"keep_last={count}: must be at least 1; use null to keep all")
    remove_leftovers(folder)
    complete = [entry for entry in list_checkpoints(folder) if entry.complete]
    latest = read_latest(folder)
    old = [e for e in complete[:-count] if not (every and e.step % every == 0) and e.path != latest]
    return [entry.path for entry in old if retire(entry.path)]


def _fresh(run_dir: Path | None) -> Resume:
    if run_dir is not None and (found := _step_folders(run_dir / CHECKPOINTS)):
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
    found = [path for folder in root.rglob(CHECKPOINTS) for path in _step_folders(folder)] if root.is_dir() else []
    if not found:
        raise CheckpointError(f"resume=last: there is no checkpoint under run.root={root}; use resume=null or a path")
    folder = max(found, key=lambda path: (_written_at(path), path.name)).parent
    path, skipped = _pick(folder, on_corrupt)
    if path is None:
        raise CheckpointError(
            f"resume=last: no checkpoint of the newest run {folder.parent} is usable ({_in_a_line(*skipped)}); "
            "use the path of another one, or null"
        )
    return Resume(path, folder.parent, skipped)


def _named(path: Path) -> Resume:
    if fault := checkpoint_fault(path):
        inside = [e.path for folder in (path, path / CHECKPOINTS) for e in list_checkpoints(folder) if e.complete]
        advice = inside[-1] if inside else "the folder of one, or null"
        raise CheckpointError(f"resume={path}: is no usable checkpoint ({_in_a_line(fault)}); use {advice}")
    return Resume(path)


def _pick(folder: Path, on_corrupt: str, content: bool = True) -> tuple[Path | None, tuple[str, ...]]:
    """The newest usable of a run's checkpoints and the faults of those passed over."""
    skipped: list[str] = []
    for path in reversed(_step_folders(folder)):
        fault = checkpoint_fault(path, content=content)
        if fault is None:
            return path, tuple(skipped)
        if on_corrupt == "refuse":
            raise CheckpointError(
                f"checkpoint.on_corrupt=refuse: {path} is damaged ({_in_a_line(fault)}); "
                "use previous to resume from the one before it"
            )
        skipped.append(fault)
    return None, tuple(skipped)


def _in_a_line(*faults: str) -> str:
    return "; ".join(line for fault in faults for line in fault.splitlines())


def _step_folders(folder: Path) -> list[Path]:
    """Folders named for a step, by rising step."""
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def _written_at(path: Path) -> int:
    """When a checkpoint was written, in ns."""
    manifest = path / MANIFEST
    return (manifest if manifest.exists() else path).stat().st_mtime_ns
