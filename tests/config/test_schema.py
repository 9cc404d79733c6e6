"""Keys, types and defaults that other modules rely on."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

import pytest

from megastack.config import choices
from megastack.config.choices import Norm
from tests.config.config_cases import a_config


def test_only_keys_without_default_are_required() -> None:
    config = a_config()
    assert (config.parallel.tp, config.parallel.dp, config.parallel.sequence_parallel) == (1, None, True)
    assert (config.optim.name, config.optim.betas, config.optim.clip_norm) == ("adamw", [0.9, 0.95], 1.0)
    assert (config.schedule.name, config.precision.compute, config.data.source) == ("1f1b", "fp32", "builtin")
    assert (config.checkpoint.at_end, config.checkpoint.every, config.observe.tensorboard) == (True, None, None)


def test_choices_equal_their_text() -> None:
    assert a_config().model.norm == "rms"
    assert Norm["rms"] is Norm("rms")


def test_choices_are_named_by_their_values() -> None:
    kinds = [kind for kind in vars(choices).values() if isinstance(kind, type) and issubclass(kind, StrEnum)]
    assert len(kinds) > 10
    assert [choice for kind in kinds for choice in kind if choice.name != choice.value] == []


def test_a_configuration_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_config().parallel.tp = 2  # type: ignore[misc]


def test_configurations_share_no_lists() -> None:
    assert a_config().optim.freeze is not a_config().optim.freeze
