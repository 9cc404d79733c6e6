"""What one key means: its type, range and default, its value in a composition and the file that gave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.config.availability import WORKS
from megastack.config.compose import trace
from megastack.config.convert import value_of
from megastack.config.fields import Key, describe_bounds, describe_type, keys
from megastack.config.names import suggest
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, Violation, one_of, spell

DEFAULT = "the default"


@dataclass(frozen=True)
class Explanation:
    """One key or section, ready to be printed.

    Args:
        key: its place in the schema.
        value: its value in the composition; None for a section.
        origin: the file that gave the value, ``the command line`` or ``the default``.
        options: for a section that is a config group, the files to choose from.
        members: for a section, its keys with their values.
    """

    key: Key
    value: Any
    origin: str
    options: tuple[str, ...] = ()
    members: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "\n".join(self._section_lines() if self.key.is_section else self._value_lines())

    def _value_lines(self) -> list[str]:
        bounds = describe_bounds(self.key.bounds)
        works = WORKS.get(self.key.name)
        lines = [
            f"{self.key.name}={spell(self.value)}",
            f"  {self.key.doc}",
            f"  type     {describe_type(self.key.type)}{', ' if bounds else ''}{bounds}",
            f"  default  {spell(self.key.default)}",
            f"  from     {self.origin}",
        ]
        return [*lines, f"  for now  only {one_of(works)}; the rest is not available yet"] if works else lines

    def _section_lines(self) -> list[str]:
        name = self.key.name
        lines = [name, f"  {self.key.doc}"]
        if self.options:
            lines.append(f"  files    {', '.join(f'{name}={option}' for option in self.options)}")
        return [*lines, *(f"  {member}={spell(value)}" for member, value in self.members)]


def explain(
    key: str, overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, config_name: str = "train"
) -> Explanation:
    """What ``key`` means and where its value in this composition came from.

    Raises:
        ConfigError: there is no such key, or the composition cannot be read.
    """
    by_name = {known.name: known for known in keys(TrainConfig)}
    if key not in by_name:
        close = suggest(key)
        raise ConfigError.of([Violation("KEY", key, "no such key", (close,) if close else ())])
    found = by_name[key]
    composition = trace(overrides, config_dir=config_dir, config_name=config_name)
    if not found.is_section:
        value = value_of(composition.config, key)
        return Explanation(found, value, composition.origin(key) or DEFAULT)
    inside = [name for name, known in by_name.items() if name.startswith(key + ".") and not known.is_section]
    members = tuple((name, value_of(composition.config, name)) for name in inside)
    return Explanation(found, None, DEFAULT, composition.options.get(key, ()), members)
