"""The run folder: its layout, and how one is taken.

``config.yaml``, ``.hydra/``, ``metrics.jsonl``, TensorBoard events, ``checkpoints/``, ``logs/``, ``dump/``,
``status.json`` and ``owner/`` live in it. A folder is created exclusively: of runs that start in the same second each
gets its own. One that is there belongs to one process at a time (:mod:`megastack.observe.ownership`).
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megastack.observe.claims import NO_JOB, Job
from megastack.observe.ownership import Ownership, claim_new, take_ownership


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run.

    Attributes:
        path: the folder.
        restart: of an elastic job; each start has its own place for accounts of failures.
    """

    path: Path
    restart: int = 0

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def status(self) -> Path:
        """The truth about how the run stands or ended."""
        return self.path / "status.json"

    @property
    def checkpoints(self) -> Path:
        """Folders ``step_00000010`` and the file ``latest``."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of one step."""
        return self.checkpoints / f"step_{step:08d}"

    @property
    def hydra(self) -> Path:
        """The command line's choices."""
        return self.path / ".hydra"

    @property
    def failures(self) -> Path:
        """What ranks wrote about their own failures."""
        return self._of_this_start("failures")

    @property
    def starts(self) -> Path:
        """The starts of an elastic job, a line each."""
        return self.path / "starts.jsonl"

    @property
    def told(self) -> Path:
        """Made by the rank that puts the accounts of all together, where no launcher does."""
        return self.failures / "told"

    @property
    def watch(self) -> Path:
        """Where ranks stood when they waited in vain, or failed."""
        return self._of_this_start("watch")

    def _of_this_start(self, name: str) -> Path:
        return self.path / name / f"restart_{self.restart}" if self.restart else self.path / name

    def log(self, rank: int) -> Path:
        """The log of one rank."""
        return self.path / "logs" / f"rank_{rank:05d}.log"

    def failure(self, rank: int) -> Path:
        """What one rank wrote about its own failure."""
        return self.failures / f"rank_{rank:05d}.json"

    def report(self, rank: int) -> Path:
        """Where one rank stood."""
        return self.watch / f"rank_{rank:05d}.json"

    def dump(self, step: int) -> Path:
        """Gradients and weights of one step."""
        return self.path / "dump" / f"step_{step}.safetensors"


@dataclass(frozen=True)
class TakenFolder:
    """A run folder that a start owns.

    Attributes:
        path: the folder.
        ownership: of this start.
        made: the folders that were made for it, outermost first.
        empty: whether there was nothing in it.
    """

    path: Path
    ownership: Ownership
    made: tuple[Path, ...] = ()
    empty: bool = True

    def undo(self) -> None:
        """Leave the folder as it was before a start that cannot go on: what it wrote into an empty one goes."""
        if not self.empty:
            return self.ownership.discard() if self.ownership.number == 1 else self.ownership.release()
        folder = RunFolder(self.path)
        with contextlib.suppress(OSError):
            shutil.rmtree(folder.hydra)
        for file in (folder.config, folder.status, folder.starts):
            with contextlib.suppress(OSError):
                file.unlink()
        self.ownership.discard()
        _remove_empty(self.made)


def claim(
    directory: str | Path | None, root: str | Path, now: float | None = None, *, job: Job = NO_JOB
) -> TakenFolder:
    """Create the folder of a new run.

    A folder belongs to whoever makes the first claim to it, so an empty one that was there will do, for one run.

    Args:
        directory: ``run.dir``; ``None`` makes ``root/<date>/<time>``.
        root: ``run.root``.
        now: unix seconds, for the name.
        job: what this is a start of.

    Returns:
        The folder, which no other run has; a taken name gets ``-2``, ``-3``, …

    Raises:
        OSError: it cannot be made, or what is there is not a folder.
    """
    if directory is None:
        moment = time.localtime(now)
        directory = Path(root) / time.strftime("%Y-%m-%d", moment) / time.strftime("%H-%M-%S", moment)
    base = Path(directory)
    base = base if base.name not in ("", "..") else base.resolve()  # as of the current folder
    if not base.name:
        raise IsADirectoryError(f"{base} is not a folder of its own")
    if base.exists() and not base.is_dir():
        raise NotADirectoryError(f"{base} is a file, not a folder")
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if (taken := _take(path, job)) is not None:
            return taken
    raise AssertionError("unreachable")


def claim_exactly(directory: str | Path, job: Job = NO_JOB) -> TakenFolder:
    """Claim a run folder under its own name, making it where it is not there; what it holds stays.

    Raises:
        FolderInUse: it has an owner that lives.
        OSError: it cannot be made or claimed; nothing is left of the attempt.
    """
    path = Path(directory)
    made = _make(path)
    try:
        empty = not any(path.iterdir())
        return TakenFolder(path, take_ownership(path, job), made, empty)
    except BaseException:
        _remove_empty(made)
        raise


def _take(path: Path, job: Job) -> TakenFolder | None:
    """Claim a folder that is new or empty and unclaimed."""
    made = _make(path)
    try:
        if not path.is_dir() or any(path.iterdir()):
            return None
        if (ownership := claim_new(path, job)) is not None:
            return TakenFolder(path, ownership, made)
        return None
    except BaseException:
        _remove_empty(made)
        raise


def _make(path: Path) -> tuple[Path, ...]:
    """Make a folder and those above it; the ones that were not there, outermost first.

    Raises:
        OSError: one cannot be made; none is left.
    """
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another start was faster
                folder.mkdir()
                made.append(folder)
    except OSError:
        _remove_empty(made)
        raise
    return tuple(made)


def _remove_empty(made: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # not empty: somebody else's
        for path in reversed(made):
            path.rmdir()
