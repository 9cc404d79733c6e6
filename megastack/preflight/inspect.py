"""Every check of a training before it starts: model, data, checkpoint, machine, run folder.

The checks run once, in the launcher or on the first rank, and one report has every error. Nothing is written.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megastack.checkpoint.folder import Resume
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.errors import ConfigError, Violation
from megastack.mesh.shape import MeshShape
from megastack.observe.metrics import tensorboard_installed
from megastack.preflight.checkpoint import check_start, resume_notes, weights_notes
from megastack.preflight.data import check_data
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.folder import Inspected, check_folder
from megastack.preflight.model import check_model


def inspect(config: TrainConfig, errors: ErrorCollector, shape: MeshShape | None) -> Inspected:
    """Check what the rules of the configuration cannot: each part once, unless a key that it depends on is invalid.

    Args:
        config: the configuration, as far as it could be read.
        errors: has the errors that are known already.
        shape: the mesh; None if its degrees are invalid.

    Raises:
        ConfigError: every error, one a line.
    """
    model = check_model(config, errors, shape)
    dataset = check_data(config, errors)
    resume, weights = check_start(config, errors, model, dataset)
    errors.check(lambda: _check_device(config), "device")
    errors.check(lambda: _check_tensorboard(config), "observe.tensorboard")
    check_folder(config, errors, resume)
    errors.require_none()
    if shape is None or dataset is None or resume is None:  # a layer or a source that fails without an error of its own
        raise ConfigError("the data or the run folder cannot be used")
    return Inspected(shape, dataset, resume, weights, _notes(config, resume, dataset, weights))


def _check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and torch.cuda.device_count() == 0:
        rule = "this machine has no GPU that torch can use"
        raise ConfigError.of([Violation("device", config.device, rule, ("auto", "cpu"))])


def _check_tensorboard(config: TrainConfig) -> None:
    if config.observe.tensorboard and not tensorboard_installed():
        advice = (None, False, "pip install tensorboard")
        raise ConfigError.of([Violation("observe.tensorboard", True, "tensorboard is not installed", advice)])


def _notes(config: TrainConfig, resume: Resume, dataset: Dataset, weights: Path | None) -> tuple[str, ...]:
    notes = [f"skipped: {error}" for error in resume.skipped]
    if resume.checkpoint is not None:
        notes += resume_notes(config, resume.checkpoint)
    elif weights is not None:
        notes += weights_notes(config, weights)
    if config.observe.tensorboard is None:
        notes.append(f"TensorBoard events: {'on' if tensorboard_installed() else 'off (tensorboard is not installed)'}")
    return (*dataset.describe().splitlines(), *notes)
