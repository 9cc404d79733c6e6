"""Composed but untyped values into a configuration object, and a configuration object as YAML text and back.

The schema's defaults are laid under the given values, every interpolation is resolved, every value is converted. What
cannot be read is collected; the caller decides how to report it.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megastack.config.convert import UNUSABLE, Conversion, defaults, to_plain
from megastack.config.fields import REQUIRED
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, Violation

_INTERPOLATION = re.compile(r"(\\*)\$\{")


def read(values: DictConfig) -> tuple[TrainConfig, list[Violation]]:
    """The configuration with these values and otherwise the schema's defaults, and what could not be read of it."""
    conversion = Conversion()
    raw = _overlaid(defaults(), OmegaConf.to_container(values, resolve=False))
    plain = _resolved(OmegaConf.create(raw), raw, "", conversion.errors)
    return conversion.section(TrainConfig, plain), conversion.errors


def to_yaml(config: TrainConfig) -> str:
    """The configuration as YAML, every key written out; :func:`from_yaml` gives an equal one back."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(to_plain(config))))


def from_yaml(text: str) -> TrainConfig:
    """The configuration that :func:`to_yaml` wrote; keys left out have the schema's defaults.

    Raises:
        ConfigError: no YAML, or values that cannot be read, all in one report.
    """
    try:
        values = OmegaConf.create(text)
    except Exception as error:  # a YAML parser raises classes of its own
        raise ConfigError(f"not a YAML text: {error}") from error
    if not isinstance(values, DictConfig):
        raise ConfigError("not a configuration: a mapping of keys is expected")
    config, errors = read(values)
    if errors:
        raise ConfigError.of(errors)
    return config


def _overlaid(base: Any, over: Any) -> Any:
    """Nested mappings, the second's values first; unlike in OmegaConf's merge, ``???`` and misfits win too."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {name: _overlaid(base.get(name), value) for name, value in over.items()}


def _resolved(node: Any, raw: Any, key: str, errors: list[Violation]) -> Any:
    """Plain values with every interpolation resolved; one without an answer is a fault and :data:`UNUSABLE`.

    Args:
        node: a node of OmegaConf's, which resolves what is read from it.
        raw: the same, unresolved.
        key: its dotted key.
        faults: where faults are added.
    """
    if isinstance(node, DictConfig):
        prefix = key + "." if key else ""
        return {str(name): _child(node, name, _inner(raw, name), prefix + str(name), errors) for name in node}
    if isinstance(node, ListConfig):
        return [_child(node, at, _inner(raw, at), f"{key}[{at}]", errors) for at in range(len(node))]
    return node


def _child(node: Any, name: Any, raw: Any, key: str, errors: list[Violation]) -> Any:
    if OmegaConf.is_missing(node, name):
        return REQUIRED
    try:
        return _resolved(node[name], raw, key, errors)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, OmegaConfBaseException) else "it refers to itself"
        errors.append(Violation(key, raw, f"this interpolation has no value: {reason}"))
        return UNUSABLE


def _inner(raw: Any, name: Any) -> Any:
    """The part of an unresolved container; of an interpolation to a whole section, its text."""
    return raw if isinstance(raw, str) else raw[name]


def _escaped(value: Any) -> Any:
    """Plain values whose texts OmegaConf reads as they stand, not as interpolations."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return _INTERPOLATION.sub(lambda found: found[1] * 2 + r"\${", value) if isinstance(value, str) else value
