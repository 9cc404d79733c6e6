"""Read composed, untyped values into a configuration object; write and read a configuration as YAML.

Reading merges the values over the schema's defaults, resolves every interpolation and converts every value. Errors are
collected and returned; the caller reports them.
"""

from __future__ import annotations

import re
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megastack.config.convert import INVALID, Conversion, defaults, to_plain, with_current_names
from megastack.config.fields import RENAMED, REQUIRED
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, Violation

_INTERPOLATION = re.compile(r"(\\*)\$\{")


def read(values: DictConfig) -> tuple[TrainConfig, list[Violation]]:
    """Read a configuration from values over the schema's defaults; also return the errors of unreadable values."""
    given, errors = with_current_names(cast(dict[str, object], OmegaConf.to_container(values, resolve=False)))
    conversion = Conversion(errors)
    raw = _overlaid(defaults(), given)
    plain = _resolved(_with_old_names(raw), raw, "", errors)
    return conversion.section(TrainConfig, plain), errors


def _with_old_names(raw: dict[str, Any]) -> DictConfig:
    """Return the values as an OmegaConf node in which interpolations may use the old names of renamed keys."""
    node = OmegaConf.create(raw)
    for old, new in RENAMED.items():
        if OmegaConf.is_dict(node.get(old.partition(".")[0])):
            OmegaConf.update(node, old, f"${{{new}}}")
    return node


def to_yaml(config: TrainConfig) -> str:
    """Write the configuration as YAML with every key; :func:`from_yaml` returns an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(to_plain(config))))


def from_yaml(text: str) -> TrainConfig:
    """Read a configuration that :func:`to_yaml` wrote; missing keys have the schema's defaults.

    Raises:
        ConfigError: the text is not YAML, or values cannot be read; one report lists them all.
    """
    try:
        values = OmegaConf.create(text)
    except Exception as error:  # YAML parsers raise their own classes
        raise ConfigError(f"not a YAML text: {error}") from error
    if not isinstance(values, DictConfig):
        raise ConfigError("not a configuration: a mapping of keys is expected")
    config, errors = read(values)
    if errors:
        raise ConfigError.of(errors)
    return config


def _overlaid(base: object, over: object) -> Any:
    """Merge nested mappings; the second takes precedence, unlike in OmegaConf also for ``???`` and mismatched types."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {name: _overlaid(base.get(name), value) for name, value in over.items()}


def _resolved(node: object, raw: Any, key: str, errors: list[Violation]) -> Any:
    """Resolve every interpolation to plain values; an interpolation without a value is an error and :data:`INVALID`.

    Args:
        node: an OmegaConf node, which resolves interpolations on access.
        raw: the same values, unresolved.
        key: the dotted key of the node.
        errors: errors are appended to this list.
    """
    if isinstance(node, DictConfig):
        prefix = key + "." if key else ""
        names = raw if isinstance(raw, dict) else node
        return {str(name): _child(node, name, _inner(raw, name), prefix + str(name), errors) for name in names}
    if isinstance(node, ListConfig):
        return [_child(node, at, _inner(raw, at), f"{key}[{at}]", errors) for at in range(len(node))]
    return node


def _child(node: DictConfig | ListConfig, name: Any, raw: Any, key: str, errors: list[Violation]) -> Any:
    if OmegaConf.is_missing(node, name):
        return REQUIRED
    try:
        return _resolved(node[name], raw, key, errors)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, OmegaConfBaseException) else "it refers to itself"
        errors.append(Violation(key, raw, f"this interpolation has no value: {reason}"))
        return INVALID


def _inner(raw: Any, name: Any) -> Any:
    """Return an item of an unresolved container; for an interpolation of a whole section, the interpolation text."""
    return raw if isinstance(raw, str) else raw[name]


def _escaped(value: object) -> Any:
    """Escape the text in plain values, so that OmegaConf does not read it as an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return _INTERPOLATION.sub(lambda found: found[1] * 2 + r"\${", value) if isinstance(value, str) else value
