"""The run folder: the paths inside it, and how a run claims it.

It contains ``config.yaml``, ``.hydra/``, ``metrics.jsonl``, TensorBoard events, ``checkpoints/``, ``logs/``, ``dump/``,
``status.json`` and ``owner/``. A folder is created exclusively, so runs that start in the same second use different
folders. An existing folder belongs to one process at a time (:mod:`megastack.observe.ownership`).
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
        restart: the restart number of an elastic job; each start has its own folder for failure reports.
    """

    path: Path
    restart: int = 0

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Metrics, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def status(self) -> Path:
        """The state of the run, or how it ended."""
        return self.path / "status.json"

    @property
    def checkpoints(self) -> Path:
        """Folders ``step_00000010`` and the file ``latest``."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint of one step."""
        return self.checkpoints / f"step_{step:08d}"

    @property
    def hydra(self) -> Path:
        """The overrides from the command line."""
        return self.path / ".hydra"

    def profile(self, step: int, rank: int) -> Path:
        """Return the Chrome trace of one step on one rank."""
        return self.path / "profile" / f"step_{step}" / f"rank_{rank:05d}.json.gz"

    def memory_snapshot(self, rank: int) -> Path:
        """Return the snapshot of a rank's GPU memory, written when it is exhausted."""
        return self.path / "profile" / f"out_of_memory_rank_{rank:05d}.pickle"

    @property
    def failures(self) -> Path:
        """The folder of failure reports."""
        return self._of_restart("failures")

    @property
    def starts(self) -> Path:
        """The starts of an elastic job, one line each."""
        return self.path / "starts.jsonl"

    @property
    def report_marker(self) -> Path:
        """Created by the rank that reports the failure for all ranks, if megastack's launcher did not start the run."""
        return self.failures / "told"

    @property
    def watch(self) -> Path:
        """The folder of the watchdogs' reports of ranks that hung or failed."""
        return self._of_restart("watch")

    def _of_restart(self, name: str) -> Path:
        return self.path / name / f"restart_{self.restart}" if self.restart else self.path / name

    def log(self, rank: int) -> Path:
        """Return the log of one rank."""
        return self.path / "logs" / f"rank_{rank:05d}.log"

    def failure(self, rank: int) -> Path:
        """Return the failure report of one rank."""
        return self.failures / f"rank_{rank:05d}.json"

    def report(self, rank: int) -> Path:
        """Return the watchdog report of one rank."""
        return self.watch / f"rank_{rank:05d}.json"

    def dump(self, step: int) -> Path:
        """Gradients and weights of one step."""
        return self.path / "dump" / f"step_{step}.safetensors"


@dataclass(frozen=True)
class TakenFolder:
    """A run folder that this process owns.

    Attributes:
        path: the folder.
        ownership: the claim to it.
        made: the folders that were created for it, outermost first.
        empty: whether the folder was empty.
    """

    path: Path
    ownership: Ownership
    made: tuple[Path, ...] = ()
    empty: bool = True

    def undo(self) -> None:
        """Undo a start that cannot continue: release the claim, and delete files written into an empty folder."""
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
    """Create and claim the folder of a new run; an existing folder can be used if it is empty and unclaimed.

    Args:
        directory: ``run.dir``; ``None`` creates ``root/<date>/<time>``.
        root: ``run.root``.
        now: the time for the folder name, in unix seconds.
        job: the job that this process belongs to.

    Returns:
        The folder; if the name is taken, ``-2``, ``-3``, … is appended.

    Raises:
        OSError: the folder cannot be created, or the path is not a folder.
    """
    if directory is None:
        moment = time.localtime(now)
        directory = Path(root) / time.strftime("%Y-%m-%d", moment) / time.strftime("%H-%M-%S", moment)
    base = Path(directory)
    base = base if base.name not in ("", "..") else base.resolve()  # relative to the current folder
    if not base.name:
        raise IsADirectoryError(f"{base} cannot be a run folder")
    if base.exists() and not base.is_dir():
        raise NotADirectoryError(f"{base} is a file, not a folder")
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if (taken := _take(path, job)) is not None:
            return taken
    raise AssertionError("unreachable")


def claim_exactly(directory: str | Path, job: Job = NO_JOB) -> TakenFolder:
    """Claim the run folder with exactly this name, creating it if needed; its content is kept.

    Raises:
        FolderInUse: the owner of the folder is alive.
        OSError: the folder cannot be created or claimed; no trace of the attempt remains.
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
    """Claim a folder that is new, or empty and unclaimed."""
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
    """Create a folder and its missing parents.

    Returns:
        The folders that were created, outermost first.

    Raises:
        OSError: a folder cannot be created; the others are removed again.
    """
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process created it first
                folder.mkdir()
                made.append(folder)
    except OSError:
        _remove_empty(made)
        raise
    return tuple(made)


def _remove_empty(made: Sequence[Path]) -> None:
    with contextlib.suppress(OSError):  # not empty, so another process uses it
        for path in reversed(made):
            path.rmdir()
