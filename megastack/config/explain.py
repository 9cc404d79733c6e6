"""The documentation of configuration keys: one key for ``megastack show KEY``, all keys for the reference page.

The reference page is generated from the schema, so the two cannot diverge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megastack.config.compose import trace
from megastack.config.convert import value_of
from megastack.config.fields import Key, current_name, describe_bounds, describe_type, keys
from megastack.config.rules import ITEMS, WORKS
from megastack.config.schema import TrainConfig
from megastack.config.suggestions import suggest
from megastack.errors import ConfigError, Violation, one_of, spell

DEFAULT = "the default"


@dataclass(frozen=True)
class Explanation:
    """One key or section; ``str`` formats it for printing.

    Args:
        key: the key as declared in the schema.
        value: its value in the composed configuration; None for a section.
        location: the file that sets the value, ``the command line`` or ``the default``.
        options: for a section that is a config group, the available files.
        members: for a section, its keys with their values.
    """

    key: Key
    value: object
    location: str
    options: tuple[str, ...] = ()
    members: tuple[tuple[str, object], ...] = ()

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
            f"  from     {self.location}",
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
    """Explain ``key``: its meaning, its value in this composition, and where the value is set.

    Raises:
        ConfigError: there is no such key, or the composition cannot be read.
    """
    key = current_name(key)
    by_name = {known.name: known for known in keys(TrainConfig)}
    if key not in by_name:
        close = suggest(key)
        raise ConfigError.of([Violation("KEY", key, "no such key", (close,) if close else ())])
    found = by_name[key]
    composition = trace(overrides, config_dir=config_dir, config_name=config_name)
    if not found.is_section:
        value = value_of(composition.config, key)
        return Explanation(found, value, composition.location(key) or DEFAULT)
    inside = [name for name, known in by_name.items() if name.startswith(key + ".") and not known.is_section]
    members = tuple((name, value_of(composition.config, name)) for name in inside)
    return Explanation(found, None, DEFAULT, composition.options.get(key, ()), members)


HEAD = """# Configuration

Every key of the configuration. `scripts/make_config_reference.py` generates this page from the dataclasses in
`megastack/config/schema.py`. A default of `???` means that a value is required; the packaged `configs/train.yaml`
provides one for each of these keys. `megastack show KEY` prints the entry of a key with its value and the file that
sets it.

`key=value` on the command line sets one key; `group=option` selects a file of a config group for a whole section.
`--config-dir` adds a folder of your own files, which take precedence over packaged files of the same name. Later
settings override earlier ones, in this order: the group files as listed in `train.yaml`, `train.yaml` itself, the
experiment, the command line. The whole configuration is read, converted to its types and validated before anything
starts; all errors are listed in one report, with exit code 78.
"""


def reference() -> str:
    """Generate the reference page in Markdown."""
    everything = list(keys(TrainConfig))
    parts = [HEAD, _table("Top level", "", [key for key in everything if "." not in key.name and not key.is_section])]
    for section in everything:
        if section.is_section:
            inside = [key for key in everything if key.name.rpartition(".")[0] == section.name and not key.is_section]
            parts.append(_table(f"`{section.name}`", section.doc, inside))
    for name, kind in ITEMS.items():
        parts.append(_table(f"`{name}[…]`", str(kind.__doc__).splitlines()[0], list(keys(kind))))
    return "\n".join(parts)


def _table(title: str, doc: str, members: list[Key]) -> str:
    lines = [f"## {title}", ""]
    if doc:
        lines += [doc, ""]
    lines += ["| key | type | default | meaning |", "|---|---|---|---|", *map(_row, members), ""]
    return "\n".join(lines)


def _row(key: Key) -> str:
    cells = (f"`{key.name}`", ", ".join(_type(key)), f"`{spell(key.default)}`", _meaning(key))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(key: Key) -> Iterator[str]:
    yield describe_type(key.type)
    if key.bounds:
        yield describe_bounds(key.bounds)


def _meaning(key: Key) -> str:
    works = WORKS.get(key.name)
    return f"{key.doc} Not available yet beyond {one_of(works)}." if works else key.doc
