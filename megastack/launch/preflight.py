"""What can be found wrong before any rank starts: device, layers and patterns of the model, data, paths.

Runs once, in the launcher or on the first rank. All that is wrong makes one report, with the rules that the
configuration breaks and the values that could not be read. Only :func:`take` writes anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megastack.assemble.data import identity
from megastack.checkpoint.folder import CHECKPOINTS, NoCheckpointError, Resume, find_checkpoint, resolve_resume
from megastack.checkpoint.manifest import read_trainer
from megastack.checkpoint.publish import recover
from megastack.config.reading import to_yaml
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.data.resume import resume_errors
from megastack.errors import ConfigError, ErrorLine, Violation
from megastack.launch.continuing import resume_notes, weights_notes
from megastack.launch.environment import job
from megastack.launch.worker import Assignment
from megastack.observe.files import replace_text
from megastack.observe.folder import RunFolder, TakenFolder, claim, claim_exactly
from megastack.observe.metrics import tensorboard_installed
from megastack.observe.ownership import FolderInUse, living_owner
from megastack.observe.status import write_status
from megastack.preflight.checks import ErrorCollector, ModelShapes, ask_data, ask_model, check_fit, check_moments

DEGREES = ("parallel.pp", "parallel.dp", "parallel.cp", "parallel.tp")


@dataclass(frozen=True)
class Inspected:
    """What was found where nothing is wrong."""

    dataset: Dataset
    resume: Resume
    weights: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A run that may start, and whose folder this process owns: to be released, or undone."""

    assignment: Assignment
    taken: TakenFolder
    dataset: Dataset
    notes: tuple[str, ...]


def inspect(
    config: TrainConfig, broken: Sequence[ErrorLine] = (), *, also: Callable[[TrainConfig], object] | None = None
) -> Inspected:
    """Ask everything that the configuration alone cannot tell, as far as it makes sense where it is broken.

    Args:
        config: the configuration, as far as it could be read.
        broken: what is known to be wrong with it.
        also: something more to ask, that raises a refusal.

    Raises:
        ConfigError: every fault found, one a line.
    """
    errors = ErrorCollector(broken)
    if also is not None:
        errors.ask(lambda: also(config), *DEGREES)
    shapes = ask_model(config, errors)
    dataset = ask_data(config, errors)
    resume = errors.ask(lambda: resolve(config), "resume", "run.dir", "run.root", "checkpoint.on_corrupt")
    checkpoint, weights = None if resume is None else resume.checkpoint, None
    if checkpoint is not None:
        errors.ask(lambda: _check_identity(config, dataset, checkpoint), "seed", "batch")
        errors.ask(lambda: check_fit("resume", checkpoint, shapes, config.checkpoint.strict), "checkpoint.strict")
        if config.checkpoint.strict:
            errors.ask(lambda: check_moments(checkpoint, shapes, config), "checkpoint.strict", "optim")
    else:
        weights = errors.ask(lambda: _check_weights(config, shapes), "checkpoint.load_weights", "checkpoint.strict")
    errors.ask(lambda: _check_device(config), "device")
    errors.ask(lambda: _check_tensorboard(config), "observe.tensorboard")
    if resume is not None and continues(resume):
        errors.ask(lambda: _check_owner(config, resume))
    else:
        errors.ask(lambda: _check_folder(config), "run.dir", "run.root")
    errors.require_none()
    if dataset is None or resume is None:  # a layer or a source that breaks without a word of its own
        raise ConfigError("the data or the run folder cannot be used")
    return Inspected(dataset, resume, weights, _notes(config, resume, dataset, weights))


def prepare(config: TrainConfig, overrides: Sequence[str] = (), broken: Sequence[ErrorLine] = ()) -> Prepared:
    """:func:`inspect`, then :func:`take`."""
    return take(config, overrides, inspect(config, broken))


def take(config: TrainConfig, overrides: Sequence[str], found: Inspected) -> Prepared:
    """Take the run folder of a configuration that nothing stands against.

    Raises:
        ConfigError: it cannot be made or written.
    """
    resume = found.resume
    taken = _folder(config, resume)
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
        config, folder.path, resume.checkpoint, os.getpid(), ownership=taken.ownership, weights=found.weights
    )
    return Prepared(assignment, taken, found.dataset, found.notes)


def resolve(config: TrainConfig) -> Resume:
    """What ``resume`` means for this configuration on this file system."""
    run = config.run
    return resolve_resume(config.resume, run.dir, run.root, on_corrupt=config.checkpoint.on_corrupt.value)


def continues(resume: Resume | None) -> bool:
    """Whether a run goes on in the folder of its checkpoint."""
    return resume is not None and resume.run_dir is not None and resume.run_dir.is_dir()


def _check_identity(config: TrainConfig, dataset: Dataset | None, checkpoint: Path) -> None:
    if dataset is not None and (found := resume_errors(read_trainer(checkpoint), identity(config, dataset))):
        raise ConfigError.of(found)


def _check_weights(config: TrainConfig, shapes: ModelShapes | None) -> Path | None:
    """The checkpoint that the weights come from."""
    key, path = "checkpoint.load_weights", config.checkpoint.load_weights
    if path is None:
        return None
    if not Path(path).is_dir():
        what = "is a file" if Path(path).exists() else "no such folder"
        raise ConfigError.of([Violation(key, path, what, ("the folder of a checkpoint or of a run", None))])
    try:
        found = find_checkpoint(Path(path), content=True)
    except NoCheckpointError as error:
        raise ConfigError.of([Violation(key, path, error.rule, (error.advice, None))]) from None
    check_fit(key, found, shapes, config.checkpoint.strict)
    return found


def _check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and torch.cuda.device_count() == 0:
        rule = "this machine has no GPU that torch can use"
        raise ConfigError.of([Violation("device", config.device, rule, ("auto", "cpu"))])


def _check_tensorboard(config: TrainConfig) -> None:
    if config.observe.tensorboard and not tensorboard_installed():
        advice = (None, False, "pip install tensorboard")
        raise ConfigError.of([Violation("observe.tensorboard", True, "tensorboard is not installed", advice)])


def _check_folder(config: TrainConfig) -> None:
    """The run folder can be made, as far as that can be told without making it."""
    run = config.run
    key, wanted = ("run.root", run.root) if run.dir is None else ("run.dir", run.dir)
    there = Path(wanted).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    rule = f"{there} is a file, not a folder" if not there.is_dir() else f"{there} cannot be written"
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ConfigError.of([Violation(key, wanted, f"cannot be created ({rule})", ("another folder",))])


def _recovered(resume: Resume) -> Resume:
    """The same once what a crash cut short in the run's folder is finished, now that it is owned."""
    if resume.run_dir is None:
        return resume
    adopted, checkpoint = recover(resume.run_dir / CHECKPOINTS), resume.checkpoint
    return resume if checkpoint is None else replace(resume, checkpoint=adopted.get(checkpoint, checkpoint))


def _check_owner(config: TrainConfig, resume: Resume) -> None:
    if resume.run_dir is not None and (living := living_owner(resume.run_dir, job())) is not None:
        raise _in_use(config, resume, str(living))


def _in_use(config: TrainConfig, resume: Resume, owner: str) -> ConfigError:
    key, value = ("run.dir", config.run.dir) if config.resume == "auto" else ("resume", config.resume)
    where = "" if key == "run.dir" else f"the newest run {resume.run_dir} "
    advice = ("another run.dir", "this one when that process has ended")
    return ConfigError.of([Violation(key, value, f"{where}is in use by {owner}", advice)])


def _folder(config: TrainConfig, resume: Resume) -> TakenFolder:
    """``auto`` and ``last`` continue in the folder of the checkpoint; everything else takes a new one."""
    try:
        if resume.run_dir is not None:
            return claim_exactly(resume.run_dir, job())
        return claim(config.run.dir, config.run.root, job=job())
    except FolderInUse as error:
        raise _in_use(config, resume, str(error)) from None
    except OSError as error:
        what = "written" if continues(resume) else "created"
        where = resume.run_dir or config.run.dir or config.run.root
        raise ConfigError(f"run.dir={where}: cannot be {what} ({error})") from None


def _describe(folder: RunFolder, config: TrainConfig, overrides: Sequence[str]) -> None:
    """The configuration and the choices that it came from; accounts of failures of an earlier try go."""
    folder.hydra.mkdir(exist_ok=True)
    for path in (folder.config, folder.hydra / "config.yaml"):
        replace_text(path, to_yaml(config))
    choices = "".join(f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides)
    replace_text(folder.hydra / "overrides.yaml", choices or "[]\n")
    if config.launch.elastic and folder.starts.exists():
        return  # each start has its own
    for record in (*folder.failures.glob("rank_*.json"), *folder.watch.glob("rank_*.json")):
        record.unlink()
    folder.report_marker.unlink(missing_ok=True)


def _notes(config: TrainConfig, resume: Resume, dataset: Dataset, weights: Path | None) -> tuple[str, ...]:
    notes = [f"passed over: {error}" for error in resume.skipped]
    if resume.checkpoint is not None:
        notes += resume_notes(config, resume.checkpoint)
    elif weights is not None:
        notes += weights_notes(config, weights)
    if config.observe.tensorboard is None:
        notes.append(f"TensorBoard events: {'on' if tensorboard_installed() else 'off (tensorboard is not installed)'}")
    return (*dataset.describe().splitlines(), *notes)
