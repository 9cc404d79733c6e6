"""Notes about a run that resumes from a checkpoint: what changed, and whether any steps are left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megastack.checkpoint.manifest import read_trainer
from megastack.config.changes import changes
from megastack.config.convert import to_plain
from megastack.config.reading import from_yaml
from megastack.config.schema import TrainConfig
from megastack.errors import CheckpointError, ConfigError
from megastack.observe.folder import RunFolder
from megastack.training.state import nothing_to_train


def resume_notes(config: TrainConfig, checkpoint: Path) -> list[str]:
    """Lines about continuing from a checkpoint that is whole; to be asked before the run folder is written to."""
    trainer = read_trainer(checkpoint)
    before = _configuration(trainer, checkpoint)
    notes = [f"resumes from {checkpoint}"]
    if before is None:
        notes.append("the checkpoint does not hold its configuration: what changes is not known")
    else:
        notes += [f"changed since the checkpoint: {change}" for change in changes(before, config)]
    if (done := int(trainer.get("step", 0))) >= config.run.steps:
        notes.append(f"{nothing_to_train(done, config.run.steps)}; use run.steps={done + 1} or more")
    return notes


def weights_notes(config: TrainConfig, checkpoint: Path) -> list[str]:
    """Lines about starting from the weights of a checkpoint: what changes of its model."""
    try:
        before = _configuration(read_trainer(checkpoint), checkpoint)
    except CheckpointError:
        return []  # weights can be loaded without it
    found = [] if before is None else changes(before, config)
    return [f"changed since checkpoint.load_weights: {each}" for each in found if each.key.startswith("model.")]


def _configuration(trainer: Mapping[str, Any], checkpoint: Path) -> Mapping[str, Any] | None:
    """The configuration of the run that saved a checkpoint: its own record, else the run folder's."""
    stored = trainer.get("config")
    if isinstance(stored, Mapping):
        return stored
    beside = RunFolder(checkpoint.absolute().parent.parent).config
    try:
        return dict(to_plain(from_yaml(beside.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None
