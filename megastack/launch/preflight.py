"""What can be found wrong before any rank starts: device, layers and patterns of the model, data, paths.

Runs once, in the launcher or on the first rank. All that is wrong makes one report, with the rules that the
configuration breaks and the values that could not be read. Only :func:`take` writes anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megastack.assemble.data import identity
from megastack.checkpoint.folder import Resume, checkpoint_fault, resolve_resume
from megastack.checkpoint.manifest import read_trainer
from megastack.config.compose import to_yaml
from megastack.config.schema import TrainConfig
from megastack.data.continuity import identity_faults
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, Fault, Violation
from megastack.faults import Faults, ask_data, ask_model, check_fit
from megastack.launch.continuing import resume_notes, weights_notes
from megastack.launch.worker import Assignment
from megastack.observe.folder import RunFolder, claim
from megastack.observe.metrics import tensorboard_installed
from megastack.observe.status import write_status

DEGREES = ("parallel.pp", "parallel.dp", "parallel.cp", "parallel.tp")


@dataclass(frozen=True)
class Inspected:
    """What was found where nothing is wrong."""

    dataset: Dataset
    resume: Resume
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A run that may start."""

    assignment: Assignment
    dataset: Dataset
    notes: tuple[str, ...]


def inspect(
    config: TrainConfig, broken: Sequence[Fault] = (), *, also: Callable[[TrainConfig], object] | None = None
) -> Inspected:
    """Ask everything that the configuration alone cannot tell, as far as it makes sense where it is broken.

    Args:
        config: the configuration, as far as it could be read.
        broken: what is known to be wrong with it.
        also: something more to ask, that raises a refusal.

    Raises:
        ConfigError: every fault found, one a line.
    """
    faults = Faults(broken)
    if also is not None:
        faults.ask(lambda: also(config), *DEGREES)
    shapes = ask_model(config, faults)
    dataset = ask_data(config, faults)
    resume = faults.ask(lambda: resolve(config), "resume", "run.dir", "run.root", "checkpoint.on_corrupt")
    checkpoint = None if resume is None else resume.checkpoint
    if checkpoint is not None:
        faults.ask(lambda: _check_identity(config, dataset, checkpoint), "seed", "batch")
        faults.ask(lambda: check_fit("resume", checkpoint, shapes, config.checkpoint.strict), "checkpoint.strict")
    else:
        faults.ask(lambda: _check_weights(config, shapes), "checkpoint.load_weights", "checkpoint.strict")
    faults.ask(lambda: _check_device(config), "device")
    faults.ask(lambda: _check_tensorboard(config), "observe.tensorboard")
    if not continues(resume):
        faults.ask(lambda: _check_folder(config), "run.dir", "run.root")
    faults.require_none()
    if dataset is None or resume is None:  # a layer or a source that breaks without a word of its own
        raise ConfigError("the data or the run folder cannot be used")
    return Inspected(dataset, resume, _notes(config, resume, dataset))


def prepare(config: TrainConfig, overrides: Sequence[str] = (), broken: Sequence[Fault] = ()) -> Prepared:
    """:func:`inspect`, then :func:`take`."""
    return take(config, overrides, inspect(config, broken))


def take(config: TrainConfig, overrides: Sequence[str], found: Inspected) -> Prepared:
    """Take the run folder of a configuration that nothing stands against.

    Raises:
        ConfigError: it cannot be made or written.
    """
    resume = found.resume
    folder = _folder(config, resume)
    try:
        _describe(folder, config, overrides)
        write_status(folder.status, "running", checkpoint=None if resume.checkpoint is None else str(resume.checkpoint))
    except OSError as error:
        raise ConfigError(f"run.dir={folder.path}: cannot be written ({error})") from None
    assignment = Assignment(config, folder.path, resume.checkpoint, os.getpid())
    return Prepared(assignment, found.dataset, found.notes)


def resolve(config: TrainConfig) -> Resume:
    """What ``resume`` means for this configuration on this file system."""
    run = config.run
    return resolve_resume(config.resume, run.dir, run.root, on_corrupt=config.checkpoint.on_corrupt.value)


def continues(resume: Resume | None) -> bool:
    """Whether a run goes on in the folder of its checkpoint."""
    return resume is not None and resume.run_dir is not None and resume.run_dir.is_dir()


def _check_identity(config: TrainConfig, dataset: Dataset | None, checkpoint: Path) -> None:
    if dataset is not None and (found := identity_faults(read_trainer(checkpoint), identity(config, dataset))):
        raise ConfigError.of(found)


def _check_weights(config: TrainConfig, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
    key, path = "checkpoint.load_weights", config.checkpoint.load_weights
    if path is None:
        return
    if not Path(path).is_dir():
        found = "is a file" if Path(path).exists() else "no such folder"
        raise ConfigError.of([Violation(key, path, found, ("the folder of a checkpoint", None))])
    if fault := checkpoint_fault(Path(path), content=False):
        rule = f"is no usable checkpoint ({'; '.join(fault.splitlines())})"
        raise ConfigError.of([Violation(key, path, rule, ("another checkpoint", None))])
    check_fit(key, Path(path), shapes, config.checkpoint.strict)


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


def _folder(config: TrainConfig, resume: Resume) -> RunFolder:
    """``auto`` and ``last`` continue in the folder of the checkpoint; everything else takes a new one."""
    if continues(resume) and resume.run_dir is not None:
        return RunFolder(resume.run_dir)
    try:
        return claim(config.run.dir, config.run.root)
    except OSError as error:
        raise ConfigError(f"run.dir={config.run.dir or config.run.root}: cannot be created ({error})") from None


def _describe(folder: RunFolder, config: TrainConfig, overrides: Sequence[str]) -> None:
    """The configuration and the choices that it came from; accounts of failures of an earlier try go."""
    folder.hydra.mkdir(exist_ok=True)
    for path in (folder.config, folder.hydra / "config.yaml"):
        path.write_text(to_yaml(config), encoding="utf-8")
    choices = "".join(f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides)
    (folder.hydra / "overrides.yaml").write_text(choices or "[]\n", encoding="utf-8")
    if config.launch.elastic and folder.starts.exists():
        return  # each start has its own
    for record in (*folder.failures.glob("rank_*.json"), *folder.watch.glob("rank_*.json")):
        record.unlink()
    folder.told.unlink(missing_ok=True)


def _notes(config: TrainConfig, resume: Resume, dataset: Dataset) -> tuple[str, ...]:
    notes = [f"passed over: {fault}" for fault in resume.skipped]
    if resume.checkpoint is not None:
        notes += resume_notes(config, resume.checkpoint)
    elif config.checkpoint.load_weights is not None:
        notes += weights_notes(config, Path(config.checkpoint.load_weights))
    if config.observe.tensorboard is None:
        notes.append(f"TensorBoard events: {'on' if tensorboard_installed() else 'off (tensorboard is not installed)'}")
    return (*dataset.describe().splitlines(), *notes)
