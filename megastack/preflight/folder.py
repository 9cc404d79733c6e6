"""The run folder: check that it can be used, claim it, and create the assignment that all ranks receive.

Only :func:`claim_run` writes to disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megastack.checkpoint.folder import CHECKPOINTS, Resume
from megastack.checkpoint.publish import recover
from megastack.config.reading import to_yaml
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, Violation
from megastack.mesh.environment import has_agent
from megastack.mesh.shape import MeshShape
from megastack.observe.claims import Job
from megastack.observe.files import replace_text
from megastack.observe.folder import RunFolder, TakenFolder, claim, claim_exactly
from megastack.observe.ownership import FolderInUse, Ownership, living_owner
from megastack.observe.process import Process
from megastack.observe.status import write_status
from megastack.preflight.errors import ErrorCollector


@dataclass(frozen=True)
class Assignment:
    """The decisions that the launcher made once for all ranks.

    Attributes:
        config: a valid configuration.
        shape: the mesh.
        folder: the run folder, which exists.
        resume: the checkpoint to resume from.
        pid: the process to signal to stop the run.
        restart: the number of restarts of an elastic job; 0 for its first start.
        start: a line about this start of an elastic job.
        ownership: the claim to the run folder, held by the process that decided.
        weights: the checkpoint to load the initial weights from.
    """

    config: TrainConfig
    shape: MeshShape
    folder: Path
    resume: Path | None = None
    pid: int | None = None
    restart: int = 0
    start: str | None = None
    ownership: Ownership | None = None
    weights: Path | None = None

    @property
    def may_write(self) -> bool:
        """Whether this run still owns the run folder."""
        return self.ownership is None or self.ownership.held


@dataclass(frozen=True)
class Inspected:
    """The results of the checks of a valid configuration.

    Attributes:
        shape: the mesh.
        dataset: the data.
        resume: the checkpoint and folder that ``resume`` refers to.
        weights: the checkpoint in ``checkpoint.load_weights``.
        notes: lines to print before the run starts.
    """

    shape: MeshShape
    dataset: Dataset
    resume: Resume
    weights: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A run that may start and whose folder this process owns; the caller must release or undo the folder."""

    assignment: Assignment
    taken: TakenFolder
    dataset: Dataset
    notes: tuple[str, ...]


def check_folder(config: TrainConfig, errors: ErrorCollector, resume: Resume | None) -> None:
    """Check that the run folder can be claimed: it has no living owner, or it can be created."""
    if resume is not None and _continues(resume):
        errors.check(lambda: _check_owner(config, resume))
    else:
        errors.check(lambda: _check_creatable(config), "run.dir", "run.root")


def claim_run(config: TrainConfig, overrides: Sequence[str], found: Inspected) -> Prepared:
    """Claim the run folder of a valid configuration, and write its configuration and status into it.

    Args:
        config: the configuration.
        overrides: the command line that it came from.
        found: the results of the checks.

    Raises:
        ConfigError: the folder cannot be created or written; no trace of the attempt remains.
    """
    resume = found.resume
    taken = _claim(config, resume)
    folder = RunFolder(taken.path)
    try:
        resume = _recovered(resume)
        _describe(folder, config, overrides)
        write_status(folder.status, "running", checkpoint=None if resume.checkpoint is None else str(resume.checkpoint))
    except BaseException as error:
        taken.undo()
        if isinstance(error, OSError):
            raise ConfigError(f"run.dir={folder.path}: cannot be written ({error})") from None
        raise
    assignment = Assignment(
        config,
        found.shape,
        folder.path,
        resume.checkpoint,
        os.getpid(),
        ownership=taken.ownership,
        weights=found.weights,
    )
    return Prepared(assignment, taken, found.dataset, found.notes)


def current_job(environment: Mapping[str, str] | None = None) -> Job:
    """Return the job that this process belongs to: torchrun's rendezvous or its own agent, and the Slurm job."""
    env = os.environ if environment is None else environment
    group, requeues = None, env.get("SLURM_RESTART_COUNT", "0")
    if has_agent(env):
        name = env["TORCHELASTIC_RUN_ID"]
        group = f"agent {Process.parent().key}" if name in ("", "none") else f"rendezvous {name}"
    return Job(group, env.get("SLURM_JOB_ID"), int(requeues) if requeues.isdecimal() else 0)


def _continues(resume: Resume | None) -> bool:
    """Whether a run continues in the folder of its checkpoint."""
    return resume is not None and resume.run_dir is not None and resume.run_dir.is_dir()


def _check_owner(config: TrainConfig, resume: Resume) -> None:
    if resume.run_dir is not None and (living := living_owner(resume.run_dir, current_job())) is not None:
        raise _in_use(config, resume, str(living))


def _check_creatable(config: TrainConfig) -> None:
    """Check that the run folder can be created, without creating it."""
    run = config.run
    key, path = ("run.root", run.root) if run.dir is None else ("run.dir", run.dir)
    nearest = Path(path).absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    rule = f"{nearest} is a file, not a folder" if not nearest.is_dir() else f"{nearest} cannot be written"
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise ConfigError.of([Violation(key, path, f"cannot be created ({rule})", ("another folder",))])


def _recovered(resume: Resume) -> Resume:
    """Finish replacements that a crash interrupted in the run folder, now owned; the checkpoint may be renamed."""
    if resume.run_dir is None:
        return resume
    renamed, checkpoint = recover(resume.run_dir / CHECKPOINTS), resume.checkpoint
    return resume if checkpoint is None else replace(resume, checkpoint=renamed.get(checkpoint, checkpoint))


def _in_use(config: TrainConfig, resume: Resume, owner: str) -> ConfigError:
    key, value = ("run.dir", config.run.dir) if config.resume == "auto" else ("resume", config.resume)
    where = "" if key == "run.dir" else f"the newest run {resume.run_dir} "
    advice = ("another run.dir", "this one when that process has ended")
    return ConfigError.of([Violation(key, value, f"{where}is in use by {owner}", advice)])


def _claim(config: TrainConfig, resume: Resume) -> TakenFolder:
    """Claim the folder of the checkpoint for ``auto`` and ``last``, otherwise a new one."""
    try:
        if resume.run_dir is not None:
            return claim_exactly(resume.run_dir, current_job())
        return claim(config.run.dir, config.run.root, job=current_job())
    except FolderInUse as error:
        raise _in_use(config, resume, str(error)) from None
    except OSError as error:
        what = "written" if _continues(resume) else "created"
        where = resume.run_dir or config.run.dir or config.run.root
        raise ConfigError(f"run.dir={where}: cannot be {what} ({error})") from None


def _describe(folder: RunFolder, config: TrainConfig, overrides: Sequence[str]) -> None:
    """Write the configuration and its overrides; remove the failure reports of an earlier attempt."""
    folder.hydra.mkdir(exist_ok=True)
    for path in (folder.config, folder.hydra / "config.yaml"):
        replace_text(path, to_yaml(config))
    choices = "".join(f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides)
    replace_text(folder.hydra / "overrides.yaml", choices or "[]\n")
    if config.launch.elastic and folder.starts.exists():
        return  # each start has its own reports
    for record in (*folder.failures.glob("rank_*.json"), *folder.watch.glob("rank_*.json")):
        record.unlink()
    folder.report_marker.unlink(missing_ok=True)
