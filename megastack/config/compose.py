"""YAML files and overrides into one typed configuration, or into one report of everything that is wrong with them.

:func:`compose` lets Hydra merge once, fills in the schema's defaults, resolves every interpolation and converts every
value before anything starts. Whatever keeps a value from being read (an unknown key or option, a missing value, a wrong
type, an interpolation without an answer) is collected; so is every rule that the values that could be read break. A
configuration that could be read is returned even when rules forbid it: ask ``rules.violations``, which also knows the
world size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megastack.config.convert import UNUSABLE, Conversion, defaults, to_plain
from megastack.config.fields import REQUIRED
from megastack.config.hydra_session import COMMAND_LINE, HydraException, Layer, Session, session
from megastack.config.overrides import Overrides, read_overrides
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, Violation

_INTERPOLATION = re.compile(r"(\\*)\$\{")


@dataclass(frozen=True)
class Composition:
    """A configuration and how it came about.

    Args:
        config: the typed configuration.
        overrides: the overrides as given.
        layers: the files and overrides that were merged, first to last.
        options: what there is to choose from in each config group.
    """

    config: TrainConfig
    overrides: tuple[str, ...]
    layers: tuple[Layer, ...]
    options: Mapping[str, tuple[str, ...]]

    def origin(self, key: str) -> str | None:
        """The file or the command line that a value came from; None for the schema's default."""
        layer = origin(self.layers, key)
        return layer.where if layer else None


def compose(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> TrainConfig:
    """The configuration that a primary file, its groups and some overrides make.

    Args:
        overrides: ``key=value`` and ``group=option``, later ones win.
        config_dir: a folder of your own YAML files, searched before the packaged ones.
        config_name: the primary file, without ``.yaml``.

    Raises:
        ConfigError: values that cannot be read, all in one report, with the broken rules among the rest.
    """
    return trace(overrides, config_dir=config_dir, config_name=config_name).config


def trace(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> Composition:
    """Like :func:`compose`, with the origin of every value."""
    name = config_name.removesuffix(".yaml")
    with session(config_dir) as hydra:
        if not hydra.exists(name):
            raise ConfigError.of([Violation("--config-name", name, "no such file", tuple(hydra.options("")))])
        given = read_overrides(overrides, hydra)
        merged, layers = _merge(hydra, name, given)
        options = {group: tuple(hydra.options(group)) for group in hydra.groups()}
    config = _typed(merged, given.faults + _hydra_keys(layers), layers)
    return Composition(config, tuple(overrides), layers, options)


def to_yaml(config: TrainConfig) -> str:
    """The configuration as YAML, every key written out; :func:`from_yaml` gives an equal one back."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(to_plain(config))))


def from_yaml(text: str) -> TrainConfig:
    """The configuration that :func:`to_yaml` wrote; keys left out have the schema's defaults.

    Raises:
        ConfigError: as :func:`compose`.
    """
    try:
        values = OmegaConf.create(text)
    except Exception as error:  # a YAML parser raises classes of its own
        raise ConfigError(f"not a YAML text: {error}") from error
    if not isinstance(values, DictConfig):
        raise ConfigError("not a configuration: a mapping of keys is expected")
    return _typed(values, [], ())


def origin(layers: Sequence[Layer], key: str) -> Layer | None:
    """The last layer that sets a key, or something that it is part of; None where none does."""
    return next((layer for layer in reversed(layers) if layer.sets(key.partition("[")[0])), None)


def _merge(hydra: Session, config_name: str, given: Overrides) -> tuple[DictConfig, tuple[Layer, ...]]:
    try:
        merged = hydra.compose(config_name, given.legal)
        return merged, tuple(hydra.layers(config_name, given.legal))
    except (HydraException, OmegaConfBaseException) as error:
        reason = " ".join(str(error.__cause__ or error).split("Config search path")[0].split())
        raise ConfigError.of([*given.faults, Violation("--config-name", config_name, reason)]) from error
    except Exception as error:  # a YAML parser raises classes of its own
        if type(error).__module__.partition(".")[0] != "yaml":
            raise
        reason = "a file of it is no YAML: " + " ".join(str(error).split())
        raise ConfigError.of([*given.faults, Violation("--config-name", config_name, reason)]) from error


def _typed(values: DictConfig, faults: Sequence[Violation], layers: Sequence[Layer]) -> TrainConfig:
    """The typed configuration; raises the given faults together with those found here and the rules that are broken."""
    conversion = Conversion()
    raw = _overlaid(defaults(), OmegaConf.to_container(values, resolve=False))
    plain = _resolved(OmegaConf.create(raw), raw, "", conversion.faults)
    config = conversion.section(TrainConfig, plain)
    found = [*faults, *(_located(fault, layers) for fault in conversion.faults)]
    if found:
        raise ConfigError.of([*found, *violations(config)])
    return config


def _overlaid(base: Any, over: Any) -> Any:
    """Nested mappings, the second's values before the first's; unlike OmegaConf's merge, ``???`` and misfits win too."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {name: _overlaid(base.get(name), value) for name, value in over.items()}


def _resolved(node: Any, raw: Any, key: str, faults: list[Violation]) -> Any:
    """Plain values with every interpolation resolved; one without an answer is a fault and :data:`UNUSABLE`.

    Args:
        node: a node of OmegaConf's, which resolves what is read from it.
        raw: the same, unresolved.
        key: its dotted key.
        faults: where faults are added.
    """
    if isinstance(node, DictConfig):
        prefix = key + "." if key else ""
        return {str(name): _child(node, name, _inner(raw, name), prefix + str(name), faults) for name in node}
    if isinstance(node, ListConfig):
        return [_child(node, at, _inner(raw, at), f"{key}[{at}]", faults) for at in range(len(node))]
    return node


def _child(node: Any, name: Any, raw: Any, key: str, faults: list[Violation]) -> Any:
    if OmegaConf.is_missing(node, name):
        return REQUIRED
    try:
        return _resolved(node[name], raw, key, faults)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, OmegaConfBaseException) else "it refers to itself"
        faults.append(Violation(key, raw, f"this interpolation has no value: {reason}"))
        return UNUSABLE


def _inner(raw: Any, name: Any) -> Any:
    """The part of an unresolved container; of an interpolation to a whole section, its text."""
    return raw if isinstance(raw, str) else raw[name]


def _located(fault: Violation, layers: Sequence[Layer]) -> Violation:
    """The fault with the interpolation that its value came from, and the file that it stands in."""
    layer = origin(layers, fault.key)
    if layer is None:
        return fault
    raw = layer.values.get(fault.key.partition("[")[0])
    notes = [f"from {raw}"] if isinstance(raw, str) and "${" in raw and raw != fault.value else []
    notes += [f"in {layer.where}"] if layer.where != COMMAND_LINE else []
    return replace(fault, rule=f"{fault.rule} ({', '.join(notes)})") if notes else fault


def _hydra_keys(layers: Sequence[Layer]) -> list[Violation]:
    """Settings of Hydra's own in YAML files: nothing here reads them."""
    return [
        Violation(key, value, f"settings of Hydra are not used (in {layer.where})", ("run.root", "run.dir"))
        for layer in layers
        for key, value in layer.values.items()
        if key.startswith("hydra.") and not isinstance(value, Mapping)
    ]


def _escaped(value: Any) -> Any:
    """Plain values whose texts OmegaConf reads as they stand, not as interpolations."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return _INTERPOLATION.sub(lambda found: found[1] * 2 + r"\${", value) if isinstance(value, str) else value
