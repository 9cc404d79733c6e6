"""The run folder: its layout, and how one is taken.

``config.yaml``, ``.hydra/``, ``metrics.jsonl``, TensorBoard events, ``checkpoints/``, ``logs/``, ``dump/`` and
``status.json`` live in it. A folder is created exclusively: of runs that start in the same second each gets its own.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path


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
        """The command line's choices; whoever makes this folder owns the run."""
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


def claim(directory: str | Path | None, root: str | Path, now: float | None = None) -> RunFolder:
    """Create the folder of a new run.

    A folder belongs to whoever makes ``.hydra`` in it, so an empty one that was there already will do, for one run.

    Args:
        directory: ``run.dir``; ``None`` makes ``root/<date>/<time>``.
        root: ``run.root``.
        now: unix seconds, for the name.

    Returns:
        The folder, which no other run has; a taken name gets ``-2``, ``-3``, …

    Raises:
        OSError: it cannot be made, or what is there is no folder.
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
    base.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = base if number == 1 else base.with_name(f"{base.name}-{number}")
        if _take(path):
            return RunFolder(path)
    raise AssertionError("unreachable")


def _take(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir() or any(path.iterdir()):
            return False
    try:
        (path / ".hydra").mkdir()
    except FileExistsError:
        return False
    return True
