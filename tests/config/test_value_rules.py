"""Paths and names that are empty or that no file system accepts are errors under their key."""

from __future__ import annotations

import typing

import pytest

from megastack.config.convert import replace_values
from megastack.config.fields import keys, without_null
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.config.value_rules import NAMES, PATHS
from megastack.testing.training import composed

BASE = [
    *("run.steps=10", "batch.global_size=4", "batch.sequence_length=8", "model.layers=2", "model.heads=4"),
    *("model.hidden=16", "model.ffn=32", "model.vocab=256"),
]
EMPTY = "must not be empty; use the path of a file"
OTHERS = {"run.sample_prompt", "schedule.name", "schedule._target_", "recompute.pattern"}
"""Texts that are no names of files: a prompt, an entry of a registry, a pattern."""


def found(override: str) -> list[str]:
    """The violations of a small configuration with this override."""
    return [str(each) for each in violations(composed(BASE, override))]


def test_every_text_key_is_a_path_or_a_name_or_listed() -> None:
    texts = {key.name for key in keys(TrainConfig) if without_null(key.type)[0] is str}
    assert texts == {*PATHS, *NAMES, *OTHERS}
    lists = {key.name for key in keys(TrainConfig) if typing.get_args(without_null(key.type)[0]) == (str,)}
    assert lists == {"data.paths", "optim.no_decay", "optim.freeze", "precision.keep_fp32"}


@pytest.mark.parametrize("text", ["", "''", "'   '"])
@pytest.mark.parametrize("key", [*PATHS, *NAMES])
def test_an_empty_text_is_an_error_with_advice(key: str, text: str) -> None:
    [line] = [line for line in found(f"{key}={text}") if line.startswith(f"{key}=")][:1]
    assert line.startswith(f"{key}='") and "': must not be empty; use " in line
    nullable = without_null(next(each.type for each in keys(TrainConfig) if each.name == key))[1]
    assert line.endswith(" or null") == nullable


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.sample_prompt=", "run.sample_prompt='': must not be empty; use a prompt or null"),
        ("data.paths=['']", f"data.paths[0]='': {EMPTY}"),
        (
            "data.blend=[{paths:[a,' '],weight:1}]",
            "data.blend[0].paths[1]=' ': must not be empty; use the path of a file",
        ),
        (
            "data.phases=[{from_step:2,paths:['']}]",
            "data.phases[0].paths[0]='': must not be empty; use the path of a file",
        ),
        ("run.name=a/b", "run.name=a/b: must be a name, not a path; use train"),
        ("run.name=..", "run.name=..: must be a name, not a path; use train"),
        ('run.name="a\\nb"', "run.name='a\\nb': must not contain control characters; use train"),
        ('run.dir="a\\nb"', "run.dir='a\\nb': must not contain control characters; use a folder or null"),
        (f"run.name={'n' * 256}", f"run.name={'n' * 256}: must be at most 255 bytes; use train"),
        (
            f"run.dir='a/{'ü' * 128}'",
            f"run.dir=a/{'ü' * 128}: must be at most 255 bytes between slashes and 4095 in all; use a folder or null",
        ),
    ],
)
def test_texts_that_no_file_system_accepts_are_errors(override: str, line: str) -> None:
    override = override.replace("\\n", "\n")
    assert line in found(override)


def test_a_null_byte_in_a_path_is_an_error() -> None:
    config = composed(BASE)
    for key in PATHS:
        lines = [str(each) for each in violations(replace_values(config, {key: "a\0b"}))]
        assert any(line.startswith(f"{key}='a\\x00b': must not contain control characters") for line in lines), key


def test_names_may_contain_non_ascii_letters_and_spaces() -> None:
    for name in ("Versuch 1", "実験\u30001", "été\u00a02"):
        assert found(f"run.name='{name}'") == [] == found(f"run.dir='outputs/{name}'")
