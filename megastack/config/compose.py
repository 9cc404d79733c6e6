"""Compose YAML files and overrides into one typed configuration, or report every error at once.

:func:`compose` merges once with Hydra, fills in the schema's defaults, resolves every interpolation and converts every
value. Errors are collected: unknown keys and options, missing values, wrong types, interpolations without a value, and
rule violations of the values that could be read. If every value can be read, :func:`compose` returns the configuration
without checking rules; ``rules.violations`` checks them, given the world size. A :class:`PartialConfig` holds the valid
values of a configuration that has errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from megastack.config.fields import current_name
from megastack.config.hydra_session import COMMAND_LINE, HydraException, Layer, Session, session
from megastack.config.overrides import Overrides, read_overrides
from megastack.config.reading import read
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.config.suggestions import known_keys
from megastack.errors import ConfigError, ErrorLine, Violation


@dataclass(frozen=True)
class Composition:
    """A configuration and how it was composed.

    Args:
        config: the typed configuration.
        overrides: the overrides as given.
        layers: the files and overrides that were merged, first to last.
        options: the available options of each config group.
    """

    config: TrainConfig
    overrides: tuple[str, ...]
    layers: tuple[Layer, ...]
    options: Mapping[str, tuple[str, ...]]

    def location(self, key: str) -> str | None:
        """Return the file that sets a key, or ``the command line``; None for the schema's default."""
        layer = _last_layer(self.layers, key)
        return layer.location if layer else None


@dataclass(frozen=True)
class PartialConfig:
    """A configuration in which some values may be invalid.

    Args:
        config: the values that could be read; rules skip the others.
        errors: one error for each value that could not be read.
        overrides: the overrides as given.
        config_dir, config_name: as for :func:`compose`.
    """

    config: TrainConfig
    errors: tuple[Violation, ...]
    overrides: tuple[str, ...]
    config_dir: str | Path | None
    config_name: str

    def located_errors(self) -> AbstractContextManager[None]:
        """Like :func:`located_errors`, for the files and overrides of this configuration."""
        return located_errors(self.overrides, config_dir=self.config_dir, config_name=self.config_name)

    def complete(self) -> TrainConfig:
        """Return the configuration, if every value could be read.

        Raises:
            ConfigError: values could not be read; also lists the rules that the other values violate.
        """
        if self.errors:
            with self.located_errors():
                raise ConfigError.of([*self.errors, *violations(self.config)])
        return self.config


def compose_partial(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> PartialConfig:
    """Like :func:`compose`, but returns the valid values and the errors instead of raising.

    Raises:
        ConfigError: files cannot be found or merged, so there are no values to read.
    """
    with session(config_dir) as hydra:
        config, errors = _read(hydra, config_name.removesuffix(".yaml"), read_overrides(overrides, hydra))
    return PartialConfig(config, tuple(errors), tuple(overrides), config_dir, config_name)


def compose(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> TrainConfig:
    """Compose a configuration from a primary file, the group files it selects, and overrides.

    Args:
        overrides: ``key=value`` and ``group=option``; later ones take precedence.
        config_dir: a folder with your own YAML files, searched before the packaged ones.
        config_name: the primary file, without ``.yaml``.

    Raises:
        ConfigError: values cannot be read; one report lists them all, with the rules that the other values violate.
    """
    return compose_partial(overrides, config_dir=config_dir, config_name=config_name).complete()


def trace(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> Composition:
    """Like :func:`compose`, but also records where each value was set; takes about twice as long."""
    name = config_name.removesuffix(".yaml")
    with session(config_dir) as hydra:
        given = read_overrides(overrides, hydra)
        config, errors = _read(hydra, name, given)
        if errors:
            raise ConfigError.of(errors)
        options = {group: tuple(hydra.options(group)) for group in hydra.groups()}
        return Composition(config, tuple(overrides), tuple(hydra.layers(name, given.valid)), options)


@contextmanager
def located_errors(
    overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> Iterator[None]:
    """A context manager in which configuration errors also name the file that set the value.

    Accepts the arguments of :func:`compose`.
    """
    try:
        yield
    except ConfigError as error:
        if not any(_key_of(line) for line in error.errors):
            raise
        with session(config_dir) as hydra:
            name, given = config_name.removesuffix(".yaml"), read_overrides(overrides, hydra)
            layers = tuple(hydra.layers(name, given.valid))
        located = ConfigError.of([_located(line, layers) for line in error.errors])
        raise located.reported_by(error.reporter) from None


def _read(hydra: Session, config_name: str, given: Overrides) -> tuple[TrainConfig, list[Violation]]:
    """Return the typed configuration as far as it can be read, and the errors in overrides, files and values."""
    config, errors = read(_merge(hydra, config_name, given))
    if not (errors or given.errors or hydra.has_own_files):
        return config, []
    layers = tuple(hydra.layers(config_name, given.valid))
    located = [_located(_packaged(error, layers), layers) for error in errors]
    return config, [*given.errors, *_hydra_keys(layers), *located]


def _merge(hydra: Session, config_name: str, given: Overrides) -> DictConfig:
    if not hydra.exists(config_name):
        unknown = Violation("--config-name", config_name, "no such file", tuple(hydra.options("")))
        raise ConfigError.of([*given.errors, unknown])
    try:
        return hydra.compose(config_name, given.valid)
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error.__cause__ or error).split("Config search path")[0]
        raise _unmergeable(config_name, reason, given) from error
    except UnicodeDecodeError as error:
        files = ", ".join(map(str, hydra.undecodable()))
        raise _unmergeable(config_name, f"it includes a file that is not UTF-8 text: {files}", given) from error
    except Exception as error:  # YAML parsers raise their own classes
        if type(error).__module__.partition(".")[0] != "yaml" and not isinstance(error, ValueError):
            raise  # a ValueError: a number of thousands of digits
        raise _unmergeable(config_name, f"it includes a file that is not YAML: {error}", given) from error


def _unmergeable(config_name: str, reason: str, given: Overrides) -> ConfigError:
    return ConfigError.of([*given.errors, Violation("--config-name", config_name, " ".join(reason.split()))])


def _last_layer(layers: Sequence[Layer], key: str) -> Layer | None:
    """Return the last layer that sets a key or a section that contains it; None if no layer does."""
    return next((layer for layer in reversed(layers) if key and layer.sets(key)), None)


ErrorLineT = TypeVar("ErrorLineT", Violation, str, ErrorLine)


def _located(error: ErrorLineT, layers: Sequence[Layer]) -> ErrorLineT:
    """Return the error with the interpolation and the file that its value came from, unless it already names them."""
    key = current_name(_key_of(error)).partition("[")[0]
    layer = _last_layer(layers, key)
    if layer is None:
        return error
    raw = layer.values.get(key)
    interpolated = isinstance(raw, str) and "${" in raw and not (isinstance(error, Violation) and raw == error.value)
    notes = [f"from {raw}"] if interpolated else []
    notes += [f"in {layer.location}"] if layer.location != COMMAND_LINE else []
    note = f" ({', '.join(notes)})"
    if not notes or note in str(error):
        return error
    if isinstance(error, Violation):
        return replace(error, rule=error.rule + note)
    rule, semicolon, advice = error.partition("; use ")
    return rule + note + semicolon + advice


def _key_of(error: ErrorLine) -> str:
    """Return the key that an error is about; empty for text that does not begin with ``key=value``."""
    if isinstance(error, Violation):
        return error.key
    key, equals, _ = error.partition("=")
    return key if equals and key.partition("[")[0] in known_keys() else ""


def _packaged(error: Violation, layers: Sequence[Layer]) -> Violation:
    """Return the error, with advice if its unknown key is from a group file without ``# @package _global_``."""
    inside = [layer for layer in layers if any(name.startswith(error.key + ".") for name in layer.values)]
    files = [layer.location for layer in inside if Path(layer.location).parent.name == error.key]
    if not files or error.rule != "no such key":
        return error
    return replace(error, rule=f"no such key; add `# @package _global_` as the first line of {files[-1]}", legal=())


def _hydra_keys(layers: Sequence[Layer]) -> list[Violation]:
    """Return an error for each Hydra setting in a YAML file; these settings have no effect here."""
    return [
        Violation(key, value, f"settings of Hydra are not used (in {layer.location})", ("run.root", "run.dir"))
        for layer in layers
        for key, value in layer.values.items()
        if key.startswith(("hydra.", "hydra/")) and not isinstance(value, Mapping)
    ]
