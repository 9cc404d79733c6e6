"""What ``megastack show`` checks beyond the rules: model and data, as far as this machine has them and it is quick.

The errors are those of a training. A run may be planned on another machine, so data that is not on this one is a note,
not an error. So is text that would take long to read, and a built-in corpus that is too short, since it stands in for
data that is not configured yet. Devices, folders and checkpoints, which concern one machine only, are not checked.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from megastack.config.convert import value_of
from megastack.config.schema import TrainConfig
from megastack.data.dataset import DatasetSpec
from megastack.data.indexed import bin_path, idx_path
from megastack.data.sources import matching_files
from megastack.errors import DataError, ErrorLine
from megastack.preflight.data import all_sources, check_data, check_data_parts
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.model import check_mesh, check_model

MOST_TEXT = 8 << 20
"""The most bytes of text that are read and cut into samples."""

_NAMED = ("data.source", "data.paths", "data.blend", "data.stages")


def preview(config: TrainConfig, known: Sequence[ErrorLine] = ()) -> list[str]:
    """Check model and data, except what depends on an invalid key.

    Args:
        config: the configuration, as far as it could be read.
        known: the errors that were found before.

    Returns:
        Notes about what could not be checked here.

    Raises:
        ConfigError: every error, one a line.
    """
    errors = ErrorCollector(known)
    check_model(config, errors, check_mesh(config, errors))
    notes = _check_data(config, errors)
    errors.require_none()
    return notes


def _check_data(config: TrainConfig, errors: ErrorCollector) -> list[str]:
    sources = errors.check(lambda: all_sources(config), *_NAMED) or []
    unchecked = _unchecked(sources, value_of(config, "data.tokenizer"))
    notes = [f"{name}: {why}, not checked" for name, why in unchecked.items()]
    if not unchecked and any(each.paths for each in sources):
        check_data(config, errors)
        return notes
    parts, whole = errors.branch(), errors.branch()
    check_data_parts(config, parts, {name.partition("=")[2] for name in unchecked})
    errors.found += parts.found
    if not unchecked and not parts.found:
        check_data(config, whole)
    return notes + [str(error) for error in whole.found]


def _unchecked(sources: Sequence[DatasetSpec], tokenizer: object) -> dict[str, str]:
    """What is not checked, as ``key=value``, and why."""
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
    """Whether a path of the data exists on this machine, even if it cannot be used."""
    return any(os.path.exists(name) for name in (path, idx_path(path), bin_path(path))) or bool(glob(path))


def _is_path(tokenizer: str) -> bool:
    return os.sep in tokenizer or tokenizer.endswith(".json")


def _size(path: str) -> int:
    try:
        return sum(file.stat().st_size for file in matching_files(Path(path), (".txt", ".jsonl")))
    except (DataError, OSError):
        return 0
