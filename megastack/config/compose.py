"""YAML files and overrides into one typed configuration, or into one report of everything that is wrong with them.

:func:`compose` lets Hydra merge once, fills in the schema's defaults, resolves every interpolation and converts every
value before anything starts. Whatever keeps a value from being read (an unknown key or option, a missing value, a wrong
type, an interpolation without an answer) is collected; so is every rule that the values that could be read break. A
configuration that could be read is returned even when rules forbid it: ask ``rules.violations``, which also knows the
world size. A :class:`PartialConfig` also holds the valid values of a configuration that has errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from megastack.config.hydra_session import COMMAND_LINE, HydraException, Layer, Session, session
from megastack.config.names import known_keys
from megastack.config.overrides import Overrides, read_overrides
from megastack.config.reading import from_yaml as from_yaml
from megastack.config.reading import read
from megastack.config.reading import to_yaml as to_yaml
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, ErrorLine, Violation


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
        layer = _origin(self.layers, key)
        return layer.where if layer else None


@dataclass(frozen=True)
class PartialConfig:
    """A configuration as far as its values could be read.

    Args:
        config: what could be read; the other values stand for something unusable, which rules pass over.
        faults: what could not be read.
        overrides: the overrides as given.
        place: ``config_dir`` and ``config_name``.
    """

    config: TrainConfig
    errors: tuple[Violation, ...]
    overrides: tuple[str, ...]
    place: Mapping[str, Any]

    def origins(self) -> AbstractContextManager[None]:
        """A context in which faults also say the file that their value came from."""
        return origins(self.overrides, **self.place)

    def whole(self) -> TrainConfig:
        """The configuration.

        Raises:
            ConfigError: values could not be read; with the broken rules among the rest.
        """
        if self.errors:
            with self.origins():
                raise ConfigError.of([*self.errors, *violations(self.config)])
        return self.config


def compose_partial(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> PartialConfig:
    """Like :func:`compose`, but with values that cannot be read it gives the others, and the faults.

    Raises:
        ConfigError: files that cannot be found or merged, so that there is nothing to be read.
    """
    with session(config_dir) as hydra:
        config, errors = _read(hydra, config_name.removesuffix(".yaml"), read_overrides(overrides, hydra))
    place = {"config_dir": config_dir, "config_name": config_name}
    return PartialConfig(config, tuple(errors), tuple(overrides), place)


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
    return compose_partial(overrides, config_dir=config_dir, config_name=config_name).whole()


def trace(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> Composition:
    """Like :func:`compose`, with where every value came from; takes about twice as long."""
    name = config_name.removesuffix(".yaml")
    with session(config_dir) as hydra:
        given = read_overrides(overrides, hydra)
        config, errors = _read(hydra, name, given)
        if errors:
            raise ConfigError.of(errors)
        options = {group: tuple(hydra.options(group)) for group in hydra.groups()}
        return Composition(config, tuple(overrides), tuple(hydra.layers(name, given.legal)), options)


@contextmanager
def origins(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> Iterator[None]:
    """A context in which faults also say the file that their value came from; arguments as for :func:`compose`."""
    try:
        yield
    except ConfigError as error:
        if not any(_key_of(problem) for problem in error.errors):
            raise
        with session(config_dir) as hydra:
            name, given = config_name.removesuffix(".yaml"), read_overrides(overrides, hydra)
            layers = tuple(hydra.layers(name, given.legal))
        located = ConfigError.of([_located(problem, layers) for problem in error.errors])
        raise located.reported_by(error.reporter) from None


def _read(hydra: Session, config_name: str, given: Overrides) -> tuple[TrainConfig, list[Violation]]:
    """The typed configuration as far as it can be read, and what overrides, files and values have against the rest."""
    config, errors = read(_merge(hydra, config_name, given))
    if not (errors or given.errors or hydra.has_own_files):
        return config, []
    layers = tuple(hydra.layers(config_name, given.legal))
    read_so_far = [_located(_packaged(error, layers), layers) for error in errors]
    return config, [*given.errors, *_hydra_keys(layers), *read_so_far]


def _merge(hydra: Session, config_name: str, given: Overrides) -> DictConfig:
    if not hydra.exists(config_name):
        unknown = Violation("--config-name", config_name, "no such file", tuple(hydra.options("")))
        raise ConfigError.of([*given.errors, unknown])
    try:
        return hydra.compose(config_name, given.legal)
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error.__cause__ or error).split("Config search path")[0]
        raise _unmergeable(config_name, reason, given) from error
    except UnicodeDecodeError as error:
        files = ", ".join(map(str, hydra.undecodable()))
        raise _unmergeable(config_name, f"a file that it takes in is no UTF-8 text: {files}", given) from error
    except Exception as error:  # a YAML parser raises classes of its own
        if type(error).__module__.partition(".")[0] != "yaml" and not isinstance(error, ValueError):
            raise  # a ValueError is a number of thousands of digits
        raise _unmergeable(config_name, f"a file that it takes in is no YAML: {error}", given) from error


def _unmergeable(config_name: str, reason: str, given: Overrides) -> ConfigError:
    return ConfigError.of([*given.errors, Violation("--config-name", config_name, " ".join(reason.split()))])


def _origin(layers: Sequence[Layer], key: str) -> Layer | None:
    """The last layer that sets a key, or something that it is part of; None where none does."""
    return next((layer for layer in reversed(layers) if key and layer.sets(key.partition("[")[0])), None)


ErrorLineT = TypeVar("ErrorLineT", Violation, str, ErrorLine)


def _located(error: ErrorLineT, layers: Sequence[Layer]) -> ErrorLineT:
    """The fault with the interpolation that its value came from, and the file that it stands in, said once."""
    key = _key_of(error)
    layer = _origin(layers, key)
    if layer is None:
        return error
    raw = layer.values.get(key.partition("[")[0])
    spelt = isinstance(raw, str) and "${" in raw and not (isinstance(error, Violation) and raw == error.value)
    notes = [f"from {raw}"] if spelt else []
    notes += [f"in {layer.where}"] if layer.where != COMMAND_LINE else []
    note = f" ({', '.join(notes)})"
    if not notes or note in str(error):
        return error
    if isinstance(error, Violation):
        return replace(error, rule=error.rule + note)
    rule, semicolon, advice = error.partition("; use ")
    return rule + note + semicolon + advice


def _key_of(error: ErrorLine) -> str:
    """The key that a fault is about; empty for one in words that begins with no key and value."""
    if isinstance(error, Violation):
        return error.key
    key, equals, _ = error.partition("=")
    return key if equals and key.partition("[")[0] in known_keys() else ""


def _packaged(error: Violation, layers: Sequence[Layer]) -> Violation:
    """The fault of a key that is the name of a config group: a file of it that was not meant to stand beneath it."""
    inside = [layer for layer in layers if any(name.startswith(error.key + ".") for name in layer.values)]
    files = [layer.where for layer in inside if Path(layer.where).parent.name == error.key]
    if not files or error.rule != "no such key":
        return error
    return replace(error, rule=f"no such key; add `# @package _global_` as the first line of {files[-1]}", legal=())


def _hydra_keys(layers: Sequence[Layer]) -> list[Violation]:
    """Settings of Hydra's own in YAML files: nothing here reads them."""
    return [
        Violation(key, value, f"settings of Hydra are not used (in {layer.where})", ("run.root", "run.dir"))
        for layer in layers
        for key, value in layer.values.items()
        if key.startswith(("hydra.", "hydra/")) and not isinstance(value, Mapping)
    ]
