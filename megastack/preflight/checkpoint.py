"""Checks of the checkpoint that a run starts from, and notes about what has changed since it was saved.

A run resumes from a checkpoint, loads only the weights of one, or starts fresh.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.assemble.data import identity
from megastack.assemble.optimizer import moment_kinds
from megastack.checkpoint.folder import NoCheckpointError, Resume, find_checkpoint, resolve_resume
from megastack.checkpoint.manifest import read_manifest, read_trainer
from megastack.config.convert import to_plain, with_current_names
from megastack.config.fields import keys
from megastack.config.reading import from_yaml
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.data.resume import resume_errors
from megastack.errors import CheckpointError, ConfigError, Violation, spell
from megastack.observe.folder import RunFolder
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.model import ModelShapes
from megastack.training.state import nothing_to_train

NAMED = 3
"""Maximum number of parameters that an error names."""
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Every kind of moment that a checkpoint can hold."""


def check_start(
    config: TrainConfig, errors: ErrorCollector, model: ModelShapes | None, dataset: Dataset | None
) -> tuple[Resume | None, Path | None]:
    """Find the checkpoint that a run starts from and check that it fits.

    Args:
        config: the configuration, as far as it could be read.
        errors: collects the errors.
        model: the shapes of the model, if it could be built.
        dataset: the data, if it could be read.

    Returns:
        The resume decision, None if ``resume`` cannot be used; and the checkpoint in ``checkpoint.load_weights``.
    """
    resume = errors.check(lambda: _resolve(config), "resume", "run.dir", "run.root", "checkpoint.on_corrupt")
    checkpoint = None if resume is None else resume.checkpoint
    if checkpoint is None:
        keys = ("checkpoint.load_weights", "checkpoint.strict")
        return resume, errors.check(lambda: _check_weights(config, model), *keys)
    errors.check(lambda: _check_identity(config, dataset, checkpoint), "seed", "batch")
    errors.check(lambda: check_fit("resume", checkpoint, model, config.checkpoint.strict), "checkpoint.strict")
    if config.checkpoint.strict:
        errors.check(lambda: check_moments(checkpoint, model, config), "checkpoint.strict", "optim")
    return resume, None


def _resolve(config: TrainConfig) -> Resume:
    """Resolve ``resume`` on this file system."""
    run = config.run
    return resolve_resume(config.resume, run.dir, run.root, on_corrupt=config.checkpoint.on_corrupt.value)


def _check_identity(config: TrainConfig, dataset: Dataset | None, checkpoint: Path) -> None:
    if dataset is not None and (found := resume_errors(read_trainer(checkpoint), identity(config, dataset))):
        raise ConfigError.of(found)


def _check_weights(config: TrainConfig, model: ModelShapes | None) -> Path | None:
    """Return the checkpoint in ``checkpoint.load_weights``; None if it is not set."""
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
    check_fit(key, found, model, config.checkpoint.strict)
    return found


def check_fit(key: str, path: Path, model: ModelShapes | None, strict: bool) -> None:
    """Check that the parameters and buffers of a checkpoint match the model's in name and shape.

    Ranks check the dtypes when they load the tensors.

    Args:
        key: the key that names the checkpoint.
        path: its folder.
        model: from :func:`~megastack.preflight.model.check_model`; None skips the check.
        strict: whether the checkpoint and the model must have the same names.

    Raises:
        ConfigError: names or shapes differ.
        CheckpointError: the checkpoint cannot be read.
    """
    if model is None:
        return
    shapes, stored = model.all, _stored("model", path)
    differences = [
        f"{name} is {list(shape)} here and {list(stored[name])} in the checkpoint"
        for name, shape in shapes.items()
        if name in stored and tuple(shape) != tuple(stored[name])
    ]
    if strict:
        differences += [f"{name} is not in the checkpoint" for name in shapes if name not in stored]
        differences += [f"{name} is only in the checkpoint" for name in stored if name not in shapes]
    if differences:
        rule = f"does not fit the model: {_first(differences)}"
        raise ConfigError.of([Violation(key, path, rule, ("the model.* of its run",))])


def check_moments(path: Path, model: ModelShapes | None, config: TrainConfig) -> None:
    """Check that a checkpoint has the moments of exactly the trained parameters, as a strict resume requires.

    Args:
        path: its folder.
        model: from :func:`~megastack.preflight.model.check_model`; None skips the check.
        config: contains the optimizer and the patterns of frozen parameters.

    Raises:
        ConfigError: the moments do not match.
        CheckpointError: the checkpoint cannot be read.
    """
    if model is None or not all(map(_is_pattern, config.optim.freeze)):
        return
    trained = {
        name for name in model.parameters if not any(re.search(pattern, name) for pattern in config.optim.freeze)
    }
    kinds, differences = moment_kinds(config), []
    for kind in MOMENTS:
        stored, expected = _stored(f"optim/{kind}", path), trained if kind in kinds else set()
        differences += [
            f"{name} has no {kind} in the checkpoint" for name in model.parameters if name in expected - stored.keys()
        ]
        differences += [
            f"{name} has {kind} only in the checkpoint"
            for name in stored
            if name not in expected and name in model.parameters
        ]
    if differences:
        advice = ("the optim.* of its run", "checkpoint.strict=false, which initializes what is missing")
        rule = f"does not fit the trained parameters: {_first(differences)}"
        raise ConfigError.of([Violation("resume", path, rule, advice)])


def _is_pattern(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _stored(prefix: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a checkpoint whose names start with a prefix, by the rest of the name."""
    tensors = read_manifest(path).tensors
    return {n.removeprefix(f"{prefix}/"): x.shape for n, x in tensors.items() if n.startswith(f"{prefix}/")}


def _first(errors: Sequence[str]) -> str:
    """Format the first few errors."""
    return ", ".join(errors[:NAMED]) + (f", and {len(errors) - NAMED} more" if len(errors) > NAMED else "")


def resume_notes(config: TrainConfig, checkpoint: Path) -> list[str]:
    """List what changes when a run resumes from a complete checkpoint; call before writing anything to its folder."""
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
    """List what changes in the model when a run starts from the weights of a checkpoint."""
    try:
        before = _configuration(read_trainer(checkpoint), checkpoint)
    except CheckpointError:
        return []  # the weights can be loaded without the trainer state
    found = [] if before is None else changes(before, config)
    return [f"changed since checkpoint.load_weights: {each}" for each in found if each.key.startswith("model.")]


def _configuration(trainer: Mapping[str, Any], checkpoint: Path) -> Mapping[str, Any] | None:
    """Return the configuration of the run that saved a checkpoint: from its trainer state, else from the run folder."""
    stored = trainer.get("config")
    if isinstance(stored, Mapping):
        return stored
    saved = RunFolder(checkpoint.absolute().parent.parent).config
    try:
        return dict(to_plain(from_yaml(saved.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None


# What has changed since the checkpoint was saved. Only keys that affect the computed values are compared: model, loss,
# optimizer, learning rate, precision, data. The folder, the parallel layout, checkpoints and records may change freely.
# Differences found here are reported; :mod:`megastack.data.resume` rejects changes of seed, batch and data.

WITHOUT_EFFECT = (
    "run",
    "launch",
    "parallel",
    "schedule",
    "recompute",
    "checkpoint",
    "observe",
    "cluster",
    "device",
    "resume",
    "compile",
    "batch.micro_size",
    "model.family",
    "loss.chunked",
    "data.source",
    "data.paths",
    "data.tokenizer",
)
"""Sections and keys that do not affect the computed values, or are compared through their samples instead."""

WITH_EFFECT = ("run.on_nonfinite",)
"""Exceptions: keys in these sections that affect the computed values."""

NULL_MEANS = {
    "lr.total_steps": "run.steps",
    "model.kv_groups": "model.heads",
    "model.max_positions": "batch.sequence_length",
}
"""The key whose value replaces a null."""

DECAY_KEYS = ("lr.total_steps", "lr.decay_steps", "lr.floor")
"""Keys without effect on a constant learning rate."""


@dataclass(frozen=True)
class Change:
    """A key with two values, printed as ``key: old -> new``."""

    key: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.key}: {spell(self.old)} -> {spell(self.new)}"


def changes(before: Mapping[str, object], config: TrainConfig) -> list[Change]:
    """Return the keys that affect the computed values and differ, in schema order.

    Args:
        before: the configuration of the checkpoint's run as nested plain values; missing keys have their defaults.
        config: a valid configuration.
    """
    old, new = _flat(with_current_names(before)[0]), _flat(to_plain(config))
    unused = DECAY_KEYS if old["lr.schedule"] == new["lr.schedule"] == "constant" else ()
    names = [name for name in new if _has_effect(name) and name not in unused]
    return [Change(name, old[name], new[name]) for name in names if _content(old[name]) != _content(new[name])]


def _has_effect(name: str) -> bool:
    return name in WITH_EFFECT or not any(name == part or name.startswith(f"{part}.") for part in WITHOUT_EFFECT)


def _flat(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the value of every schema key."""
    found = {key.name: _at(values, key.name, to_plain(key.default)) for key in keys(TrainConfig) if not key.is_section}
    return found | {name: found[other] for name, other in NULL_MEANS.items() if found[name] is None}


def _at(values: object, name: str, default: object) -> Any:
    for part in name.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return default
        values = values[part]
    return values


def _content(value: object) -> object:
    """Return a value without the paths and source of blend entries, because files may have moved."""
    if isinstance(value, list):
        return [_content(item) for item in value]
    if isinstance(value, Mapping) and "weight" in value:
        return {name: item for name, item in value.items() if name not in ("paths", "source")}
    return value
