"""The checks before training starts (:func:`inspect`) and the checks of ``megastack show`` (:func:`preview`).

The training checks run once, in the launcher or on rank 0: model, data, checkpoint, machine, run folder. One report
lists every error. Nothing is written.

``show`` reports the same errors as training. A run may be planned on another machine, so data that does not exist here
is a note, not an error. Text that would take long to read is also a note, and so is a built-in corpus that is too
short, since it is a placeholder for data that is not configured yet. Devices, folders and checkpoints are not checked,
because they concern a single machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path

from megastack.checkpoint.folder import Resume
from megastack.config.choices import Device
from megastack.config.convert import replace_values, value_of
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset, DatasetSpec
from megastack.data.indexed import bin_path, idx_path
from megastack.data.sources import matching_files
from megastack.errors import ConfigError, DataError, ErrorLine, Violation
from megastack.mesh.device import count_gpus
from megastack.mesh.shape import MeshShape
from megastack.observe.metrics import tensorboard_installed
from megastack.preflight.checkpoint import check_start, resume_notes, weights_notes
from megastack.preflight.data import all_sources, check_data, check_data_parts
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.folder import Inspected, check_folder
from megastack.preflight.model import check_mesh, check_model

MOST_TEXT = 8 << 20
"""Maximum number of bytes of text that are read and cut into samples."""

_SOURCE_KEYS = ("data.source", "data.paths", "data.blend", "data.phases")


def inspect(config: TrainConfig, errors: ErrorCollector, shape: MeshShape | None) -> Inspected:
    """Check what the configuration rules cannot: each part once, unless a key that it depends on is invalid.

    Args:
        config: the configuration, as far as it could be read.
        errors: contains the errors found so far.
        shape: the mesh; None if its degrees are invalid.

    Raises:
        ConfigError: every error, one per line.
    """
    model = check_model(config, errors, shape)
    dataset = check_data(config, errors)
    resume, weights = check_start(config, errors, model, dataset)
    errors.check(lambda: _check_device(config, shape), "device")
    errors.check(lambda: _check_tensorboard(config), "observe.tensorboard")
    check_folder(config, errors, resume)
    errors.require_none()
    if shape is None or dataset is None or resume is None:  # a layer or a source failed without an error of its own
        raise ConfigError("the data or the run folder cannot be used")
    return Inspected(shape, dataset, resume, weights, _notes(config, resume, dataset, weights))


def with_device(config: TrainConfig) -> TrainConfig:
    """The configuration with the device that ``device=auto`` selects on this machine."""
    if config.device != "auto":
        return config
    return replace_values(config, {"device": Device.cuda if count_gpus() else Device.cpu})


def _check_device(config: TrainConfig, shape: MeshShape | None) -> None:
    """Check that the device exists, and the rules that depend on the device that ``device=auto`` selects."""
    if config.device == "cuda" and count_gpus() == 0:
        rule = "this machine has no GPU that torch can use"
        raise ConfigError.of([Violation("device", config.device, rule, ("auto", "cpu"))])
    if config.device == "auto" and (found := _errors_of_selected_device(config, shape)):
        raise ConfigError.of(found)


def _errors_of_selected_device(config: TrainConfig, shape: MeshShape | None) -> list[Violation]:
    selected, ranks = with_device(config), None if shape is None else shape.world_size
    known = violations(config, ranks)
    return [
        replace(
            found,
            rule=f"{found.rule} (device=auto selects {selected.device.value} on this machine)",
            legal=tuple(each for each in found.legal if each != "device=cuda"),
        )
        for found in violations(selected, ranks)
        if found not in known
    ]


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


def preview(config: TrainConfig, known: Sequence[ErrorLine] = ()) -> list[str]:
    """Check model and data, except for checks that depend on an invalid key.

    Args:
        config: the configuration, as far as it could be read.
        known: the errors found so far.

    Returns:
        Notes about what could not be checked on this machine.

    Raises:
        ConfigError: every error, one per line.
    """
    errors = ErrorCollector(known)
    check_model(config, errors, check_mesh(config, errors))
    notes = _preview_data(config, errors)
    errors.require_none()
    return notes


def _preview_data(config: TrainConfig, errors: ErrorCollector) -> list[str]:
    sources = errors.check(lambda: all_sources(config), *_SOURCE_KEYS) or []
    unchecked = _unchecked(sources, value_of(config, "data.tokenizer"))
    notes = [f"{name}: {why}, not checked" for name, why in unchecked.items()]
    if not unchecked and any(each.paths for each in sources):
        check_data(config, errors)
        return notes
    of_parts, of_all = errors.branch(), errors.branch()
    check_data_parts(config, of_parts, {name.partition("=")[2] for name in unchecked})
    errors.found += of_parts.found
    if not unchecked and not of_parts.found:
        check_data(config, of_all)
    return notes + [str(error) for error in of_all.found]


def _unchecked(sources: Sequence[DatasetSpec], tokenizer: object) -> dict[str, str]:
    """Return the values that are not checked, as ``key=value``, and the reasons."""
    absent = "is not on this machine"
    named = [(each.source, str(path)) for each in sources for path in each.paths]
    found = {f"data.paths={path}": absent for _, path in named if not _is_here(path)}
    text = [path for source, path in named if source != "bin" and f"data.paths={path}" not in found]
    if (size := sum(map(_size, text))) > MOST_TEXT:
        found |= {f"data.paths={path}": f"{size >> 20:,} MiB of text in all" for path in text}
    if isinstance(tokenizer, str) and _is_path(tokenizer) and not os.path.exists(tokenizer):
        found[f"data.tokenizer={tokenizer}"] = absent
    return found


def _is_here(path: str) -> bool:
    """Whether a data path exists on this machine, even if it cannot be used."""
    return any(os.path.exists(name) for name in (path, idx_path(path), bin_path(path))) or bool(glob(path))


def _is_path(tokenizer: str) -> bool:
    return os.sep in tokenizer or tokenizer.endswith(".json")


def _size(path: str) -> int:
    try:
        return sum(file.stat().st_size for file in matching_files(Path(path), (".txt", ".jsonl")))
    except (DataError, OSError):
        return 0
