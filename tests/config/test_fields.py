"""Fields hold the data for the reference page and the range checks."""

from __future__ import annotations

from typing import Any

import pytest

from megastack.config.choices import Norm
from megastack.config.fields import REQUIRED, describe_bounds, describe_type, keys
from megastack.config.schema import OptimGroupOptions, TrainConfig

BY_NAME = {key.name: key for key in keys(TrainConfig)}


def test_every_key_is_documented() -> None:
    undocumented = [key.name for key in BY_NAME.values() if not key.doc.strip().endswith(".")]
    assert undocumented == []


def test_every_number_has_a_lower_bound() -> None:
    unbounded = [
        key.name
        for key in BY_NAME.values()
        if key.type in (int, float, int | None, float | None, list[int], list[float]) and not key.bounds
    ]
    assert unbounded == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "int"),
        (int | None, "int or null"),
        (list[int] | None, "list of int or null"),
        (Norm, "rms, layer"),
        (list[OptimGroupOptions], "list of {pattern, lr_scale, weight_decay}"),
        (Any, "mapping or null"),
    ],
)
def test_types_in_words(kind: Any, text: str) -> None:
    assert describe_type(kind) == text


def test_bounds_in_words() -> None:
    assert describe_bounds({"least": 0, "below": 1}) == "at least 0 and below 1"
    assert describe_bounds({}) == ""


def test_keys_without_default_are_marked() -> None:
    required = {name for name, key in BY_NAME.items() if not key.is_section and key.default == REQUIRED}
    assert required == {
        "run.steps",
        "batch.global_size",
        "batch.sequence_length",
        *(f"model.{name}" for name in ("layers", "heads", "hidden", "ffn", "vocab")),
    }


def test_list_defaults_are_not_shared() -> None:
    first, second = (
        BY_NAME["optim.groups"].default,
        {key.name: key for key in keys(TrainConfig)}["optim.groups"].default,
    )
    assert first == second == []
    assert first is not second
