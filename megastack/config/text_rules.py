"""Rules about texts that name something: paths of files and folders, names of runs and clusters."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from megastack.config.convert import value_of
from megastack.config.schema import TrainConfig
from megastack.errors import Violation

PATHS: Mapping[str, tuple[Any, ...]] = {
    "resume": ("auto", "last", "the path of a checkpoint", None),
    "run.root": ("outputs",),
    "run.dir": ("a folder", None),
    "schedule.path": ("a file", None),
    "data.tokenizer": ("byte", "the path of a tokenizer.json"),
    "checkpoint.load_weights": ("the folder of a checkpoint", None),
}
"""Keys that are read as a path, and what is used instead of one that names nothing."""

NAMES: Mapping[str, tuple[Any, ...]] = {"run.name": ("train",), "cluster.name": ("local",)}
"""Keys that are the name of something, and an example."""

LONGEST_NAME = 255
"""Bytes of a file's name that file systems take."""
LONGEST_PATH = 4095


def texts_name_something(config: TrainConfig) -> Iterator[Violation]:
    """Paths and names are not empty and hold nothing that a file system cannot take."""
    for key, advice in {**PATHS, **NAMES}.items():
        value = value_of(config, key)
        if isinstance(value, str) and (error := _fault(value, is_name=key in NAMES)):
            yield Violation(key, _shown(value), error, advice)
    prompt = value_of(config, "run.sample_prompt")
    if isinstance(prompt, str) and not prompt:
        yield Violation("run.sample_prompt", "''", "must not be empty", ("a prompt", None))
    for key, paths in _lists_of_paths(config):
        for at, path in enumerate(paths):
            if error := _fault(path, is_name=False):
                yield Violation(f"{key}[{at}]", _shown(path), error, ("the path of a file",))


def _lists_of_paths(config: TrainConfig) -> Iterator[tuple[str, list[str]]]:
    """Every list of paths with its key; of what could not be read nothing is said."""
    blend, stages = (value_of(config, key) for key in ("data.blend", "data.stages"))
    lists: list[tuple[str, Any]] = [("data.paths", value_of(config, "data.paths")), *_of_blend("data.blend", blend)]
    for at, stage in enumerate(stages if isinstance(stages, list) else ()):
        lists += [(f"data.stages[{at}].paths", stage.paths), *_of_blend(f"data.stages[{at}].blend", stage.blend)]
    yield from ((key, paths) for key, paths in lists if isinstance(paths, list))


def _of_blend(key: str, blend: Any) -> list[tuple[str, Any]]:
    return [(f"{key}[{at}].paths", each.paths) for at, each in enumerate(blend if isinstance(blend, list) else ())]


def _fault(text: str, *, is_name: bool) -> str | None:
    """What keeps a text from being a path, or a name."""
    if not text.strip():
        return "must not be empty"
    if not _is_plain(text):
        return "must not contain control characters"
    parts = [text] if is_name else text.split("/")
    if max(len(part.encode()) for part in parts) > LONGEST_NAME or len(text.encode()) > LONGEST_PATH:
        return f"must be at most {LONGEST_NAME} bytes{'' if is_name else f' between slashes and {LONGEST_PATH} in all'}"
    if is_name and ("/" in text or text in (".", "..")):
        return "must be a name, not a path"
    return None


def _shown(text: str) -> str:
    """The text itself where it can be seen on a line."""
    return text if text.strip() and _is_plain(text) else repr(text)


def _is_plain(text: str) -> bool:
    """Whether a text has neither control characters nor halves of surrogate pairs, which no file holds."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)
