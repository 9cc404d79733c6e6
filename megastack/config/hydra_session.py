"""The interface to Hydra: find YAML files, parse overrides, merge them, and report the merge order.

This is the only module that imports Hydra. Hydra composes untyped values from files and overrides. Types, unknown keys
and rules are checked elsewhere, because Hydra stops at the first error and does not check interpolations. A session
restores Hydra's global state when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as Override
from hydra.core.override_parser.types import ValueType as ValueType
from hydra.errors import HydraException as HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from megastack.config.fields import current_name
from megastack.errors import ConfigError, Violation

COMMAND_LINE = "the command line"
_NOT_HYDRAS = tuple(f"~hydra/{group}" for entry in HydraConf().defaults for group, option in entry.items() if option)
"""Removes Hydra's own settings, which megastack does not use, from every composition."""


def packaged_configs() -> Path:
    """Return the folder of the packaged YAML files: ``configs/`` in a checkout, otherwise inside the package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "train.yaml").is_file() else package / "configs"


@dataclass(frozen=True)
class Layer:
    """One file or override that was merged.

    Args:
        location: the file, or ``the command line``.
        values: the values it sets, by dotted key; renamed keys under their current names.
    """

    location: str
    values: Mapping[str, object]

    def sets(self, key: str) -> bool:
        """Whether this layer sets ``key`` or a section that contains it."""
        path = key.split(".")
        above = (".".join(path[:depth]) for depth in range(1, len(path)))
        return key in self.values or any(
            name in self.values and not isinstance(self.values[name], Mapping) for name in above
        )


class Session:
    """Composes from one set of folders; created by :func:`session`."""

    def __init__(self, loader: ConfigLoader, own: Path | None) -> None:
        self._loader, self._own = loader, own

    @property
    def has_own_files(self) -> bool:
        """Whether the user passed a folder."""
        return self._own is not None

    def undecodable(self) -> list[Path]:
        """Return the files of the user's folder that are not UTF-8 text."""
        files = () if self._own is None else sorted(self._own.rglob("*.yaml"))
        return [path for path in files if path.is_file() and not _is_text(path)]

    def groups(self) -> list[str]:
        """Return the config groups: ``model``, ``parallel``, …"""
        return [group for group in self._loader.list_groups("") if not group.startswith("hydra")]

    def options(self, group: str) -> list[str]:
        """Return the files of a group, without their suffix."""
        return [option for option in self._loader.get_group_options(group) if not option.startswith("_")]

    def exists(self, config_name: str) -> bool:
        """Whether a primary configuration of this name exists."""
        return config_name in self.options("")

    def parse(self, override: str) -> Override:
        """Parse one override, with globs resolved against the files.

        Raises:
            HydraException: the text does not have the form ``key=value``.
        """
        return OverridesParser.create(config_loader=self._loader).parse_overrides([override])[0]

    def compose(self, config_name: str, overrides: Sequence[str]) -> DictConfig:
        """Merge the values, with interpolations unresolved."""
        return compose(config_name, overrides=[*_NOT_HYDRAS, *overrides])

    def layers(self, config_name: str, overrides: Sequence[str]) -> Iterator[Layer]:
        """Yield the files and overrides that :meth:`compose` merges, first to last.

        Raises:
            ConfigError: a file is not a mapping of keys.
        """
        chosen = self._loader.compute_defaults_list(config_name, [*_NOT_HYDRAS, *overrides], RunMode.RUN)
        for default in chosen.defaults:
            if default.config_path and default.config_path.partition("/")[0] != "hydra":
                yield self._file(config_name, default.config_path, default.package or "")
        for override in chosen.config_overrides:
            key = override.key_or_group
            if not key.startswith("hydra."):
                yield Layer(COMMAND_LINE, dict(_flat({key: override.value()})))

    def _file(self, config_name: str, path: str, package: str) -> Layer:
        for source in self._loader.get_sources():
            if source.is_config(path):
                values = OmegaConf.to_container(source.load_config(path).config, resolve=False)
                place = Path(source.path.removeprefix("file://")) / path
                file = str(place.with_name(place.name.removesuffix(".yaml") + ".yaml"))
                if not isinstance(values, dict):
                    rule = f"it includes a file that is a list, not a mapping of keys: {file}"
                    raise ConfigError.of([Violation("--config-name", config_name, rule)])
                chosen = values.pop("defaults", None)
                return Layer(file, {**dict(_flat(values, package)), **dict(_groups_of_hydra(chosen))})
        raise AssertionError(f"{path} was composed but no source contains it")


def _groups_of_hydra(defaults: object) -> Iterator[tuple[str, object]]:
    """Yield the options of Hydra's own config groups that a defaults list selects."""
    for entry in defaults if isinstance(defaults, list) else ():
        named = entry if isinstance(entry, Mapping) else dict([str(entry).rpartition("/")[::2]])
        for group, option in named.items():
            name = str(group).rpartition(" ")[2].removeprefix("/")  # after `override` or `optional`
            if name.startswith("hydra/"):
                yield name, option


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _flat(values: Mapping[Any, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Flatten nested mappings to dotted keys, outer keys before inner ones; renamed keys under their current names."""
    for name, value in values.items():
        key = current_name(f"{prefix}.{name}" if prefix else str(name))
        yield key, value
        if isinstance(value, Mapping):
            yield from _flat(value, key)


@contextmanager
def session(config_dir: str | Path | None = None) -> Iterator[Session]:
    """Open a session over the packaged files and the user's folder, which is searched first.

    Raises:
        ConfigError: the user's folder does not exist or is not a folder.
    """
    packaged = packaged_configs()
    own = packaged if config_dir is None else Path(config_dir).expanduser().resolve()
    if not own.is_dir():
        rule = "is a file" if own.exists() else "no such folder"
        raise ConfigError.of([Violation("--config-dir", config_dir, rule, ("a folder of YAML files",))])
    with initialize_config_dir(str(packaged), job_name="megastack", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        if config_dir is not None:
            search = loader.get_search_path()
            search.prepend(provider="--config-dir", path=f"file://{own}", anchor="main")
            loader.repository.initialize_sources(search)  # type: ignore[attr-defined]
        yield Session(loader, None if config_dir is None else own)
