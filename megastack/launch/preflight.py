"""What can be found wrong before any rank starts: device, layers and patterns of the model, data, paths.

Runs once, in the launcher or on the first rank. It touches nothing until everything else was found right; taking the
run folder comes last.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from megastack.build import check_model, identity, identity_faults, read_dataset
from megastack.checkpoint.folder import Resume, checkpoint_fault, resolve_resume
from megastack.checkpoint.manifest import read_trainer
from megastack.config.compose import to_yaml
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, MegastackError
from megastack.launch.worker import Assignment
from megastack.observe.folder import RunFolder, claim
from megastack.observe.metrics import tensorboard_installed
from megastack.observe.status import write_status

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A run that may start."""

    assignment: Assignment
    dataset: Dataset
    notes: tuple[str, ...]


def prepare(config: TrainConfig, overrides: Sequence[str] = ()) -> Prepared:
    """Check everything that the configuration alone cannot tell, then take the run folder.

    Raises:
        ConfigError: every fault found, one a line.
    """
    faults: list[str] = []
    _tried(faults, lambda: _check_model(config))
    dataset = _tried(faults, lambda: read_dataset(config))
    resume = _tried(faults, lambda: resolve(config))
    if dataset is not None and resume is not None and resume.checkpoint is not None:
        faults += identity_faults(read_trainer(resume.checkpoint), identity(config, dataset))
    if resume is None or resume.checkpoint is None:
        _tried(faults, lambda: _check_weights(config))
    _tried(faults, lambda: _check_device(config))
    if config.observe.tensorboard and not tensorboard_installed():
        faults.append("observe.tensorboard=true: tensorboard is not installed; use null, false, or install it")
    if faults or dataset is None or resume is None:
        raise ConfigError("\n".join(faults))
    folder = _folder(config, resume)
    try:
        _describe(folder, config, overrides)
        write_status(folder.status, "running", checkpoint=None if resume.checkpoint is None else str(resume.checkpoint))
    except OSError as error:
        raise ConfigError(f"run.dir={folder.path}: cannot be written ({error})") from None
    assignment = Assignment(config, folder.path, resume.checkpoint, os.getpid())
    return Prepared(assignment, dataset, _notes(config, resume, dataset))


def resolve(config: TrainConfig) -> Resume:
    """What ``resume`` means for this configuration on this file system."""
    run = config.run
    return resolve_resume(config.resume, run.dir, run.root, on_corrupt=config.checkpoint.on_corrupt.value)


def _check_model(config: TrainConfig) -> None:
    """What the model itself refuses; other errors are left to the ranks, which report them with their traceback."""
    try:
        check_model(config)
    except MegastackError:
        raise
    except Exception as error:
        logging.getLogger(__name__).debug("left to the ranks: %s", error)


def _check_weights(config: TrainConfig) -> None:
    path = config.checkpoint.load_weights
    if path is None:
        return
    if not Path(path).is_dir():
        found = "is a file" if Path(path).exists() else "no such folder"
        raise ConfigError(f"checkpoint.load_weights={path}: {found}; use the folder of a checkpoint, or null")
    if fault := checkpoint_fault(Path(path), content=False):
        raise ConfigError(f"checkpoint.load_weights={path}: is no usable checkpoint\n{fault}")


def _check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and torch.cuda.device_count() == 0:
        raise ConfigError("device=cuda: this machine has no GPU that torch can use; use auto or cpu")


def _tried(faults: list[str], ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except (MegastackError, OSError) as error:
        faults.append(str(error))
        return None


def _folder(config: TrainConfig, resume: Resume) -> RunFolder:
    """``auto`` and ``last`` continue in the folder of the checkpoint; everything else takes a new one."""
    if resume.run_dir is not None and resume.run_dir.is_dir():
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


def _notes(config: TrainConfig, resume: Resume, dataset: Dataset) -> tuple[str, ...]:
    notes = [f"passed over: {fault}" for fault in resume.skipped]
    if resume.checkpoint is not None:
        notes.append(f"resumes from {resume.checkpoint}")
    if config.observe.tensorboard is None:
        notes.append(f"TensorBoard events: {'on' if tensorboard_installed() else 'off (tensorboard is not installed)'}")
    return (*dataset.describe().splitlines(), *notes)
