"""Configurations that Python code made or changed: their values as the schema types them, or what is wrong with them.

``dataclasses.replace`` puts anything anywhere. Whatever takes a configuration from a user asks here first, so that a
value of another type is refused by its key, as it is in a YAML file. Numbers of NumPy, tuples, paths and the names of
choices become what the schema holds; a text that spells a number does not. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from megastack.config.convert import Conversion, to_plain
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, Violation


def typed(config: Any) -> tuple[TrainConfig, list[Violation]]:
    """The configuration with every value of its key's type, and a fault for each that is of another.

    Values that stand for something unusable are passed over, and stand for those of another type as well.

    Raises:
        ConfigError: it is not a configuration at all.
    """
    if not isinstance(config, TrainConfig):
        rule = "must be a TrainConfig"
        raise ConfigError.of([Violation("config", type(config).__name__, rule, ("megastack.compose(overrides)",))])
    conversion = Conversion(strict=True)
    return conversion.section(TrainConfig, to_plain(config)), conversion.errors
