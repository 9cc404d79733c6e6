"""The keys, types and defaults that others rely on."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

import pytest

from megastack.config import choices
from megastack.config.choices import Norm
from tests.config.config_cases import a_config


def test_a_config_needs_only_what_has_no_default() -> None:
    config = a_config()
    assert (config.parallel.tp, config.parallel.dp, config.parallel.sequence_parallel) == (1, None, True)
    assert (config.optim.name, config.optim.betas, config.optim.clip_norm) == ("adamw", [0.9, 0.95], 1.0)
    assert (config.schedule.name, config.precision.compute, config.data.source) == ("1f1b", "fp32", "builtin")
    assert (config.checkpoint.at_end, config.checkpoint.every, config.observe.tensorboard) == (True, None, None)


def test_choices_compare_with_their_text() -> None:
    assert a_config().model.norm == "rms"
    assert Norm["rms"] is Norm("rms")


def test_choices_are_named_as_they_are_written() -> None:
    kinds = [kind for kind in vars(choices).values() if isinstance(kind, type) and issubclass(kind, StrEnum)]
    assert len(kinds) > 10
    assert [choice for kind in kinds for choice in kind if choice.name != choice.value] == []


def test_a_config_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_config().parallel.tp = 2  # type: ignore[misc]


def test_two_configs_share_no_list() -> None:
    assert a_config().optim.freeze is not a_config().optim.freeze
