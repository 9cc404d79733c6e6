"""What ``megastack show`` asks beyond the rules: model and data, as far as a moment and this machine allow.

The answers are those of the preflight of a training. A plan may be made on another machine than the run, so data that
is not here is no fault but a note. So is text that would take long to read, and a built-in corpus that is too short: it
stands in for data that is not configured yet. What concerns a machine alone (its devices, folders and checkpoints) is
not asked.
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
from megastack.preflight.checks import ErrorCollector, all_sources, ask_data, ask_model, ask_parts_of_data

MOST_TEXT = 8 << 20
"""Bytes of text up to which it is read and cut into samples."""

_NAMED = ("data.source", "data.paths", "data.blend", "data.phases")


def look(config: TrainConfig, broken: Sequence[ErrorLine] = ()) -> list[str]:
    """Ask model and data, as far as it makes sense where the configuration is broken.

    Args:
        config: the configuration, as far as it could be read.
        broken: what is known to be wrong with it.

    Returns:
        What could not be checked here.

    Raises:
        ConfigError: every fault found, one a line.
    """
    errors = ErrorCollector(broken)
    ask_model(config, errors)
    notes = _ask_data(config, errors)
    errors.require_none()
    return notes


def _ask_data(config: TrainConfig, errors: ErrorCollector) -> list[str]:
    sources = errors.ask(lambda: all_sources(config), *_NAMED) or []
    unchecked = _unchecked(sources, value_of(config, "data.tokenizer"))
    notes = [f"{name}: {why}, not checked" for name, why in unchecked.items()]
    if not unchecked and any(each.paths for each in sources):
        ask_data(config, errors)
        return notes
    parts, whole = errors.separately(), errors.separately()
    ask_parts_of_data(config, parts, {name.partition("=")[2] for name in unchecked})
    errors.found += parts.found
    if not unchecked and not parts.found:
        ask_data(config, whole)
    return notes + [str(error) for error in whole.found]


def _unchecked(sources: Sequence[DatasetSpec], tokenizer: object) -> dict[str, str]:
    """What is not to be looked at, as ``key=value``, and why."""
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
    """Whether a path of the data names something on this machine, be it unusable."""
    return any(os.path.exists(name) for name in (path, idx_path(path), bin_path(path))) or bool(glob(path))


def _is_path(tokenizer: str) -> bool:
    return os.sep in tokenizer or tokenizer.endswith(".json")


def _size(path: str) -> int:
    try:
        return sum(file.stat().st_size for file in matching_files(Path(path), (".txt", ".jsonl")))
    except (DataError, OSError):
        return 0
