"""The reference page of the configuration as Markdown, made from the schema so that it cannot disagree with it."""

from __future__ import annotations

from collections.abc import Iterator

from megastack.config.availability import WORKS
from megastack.config.fields import Key, describe_bounds, describe_type, keys
from megastack.config.rules import ITEMS
from megastack.config.schema import TrainConfig
from megastack.errors import one_of, spell

HEAD = """# Configuration

Every key, from the dataclasses in `megastack/config/schema.py` (this page is written by
`scripts/make_config_reference.py`). `???` as a default means that a value has to be given; the packaged
`configs/train.yaml` gives one for each. `megastack show KEY` prints a key's entry with its value and the file that the
value came from.

A value is set on the command line by `key=value`, a whole section by choosing a file of its group, `group=option`; your
own files are found with `--config-dir`, before the packaged ones of the same name. Later wins: the files of the groups
in the order of `train.yaml`, `train.yaml` itself, the experiment, the command line. Everything is read, typed and
checked before anything starts, and all faults come in one report with exit code 78.
"""


def reference() -> str:
    """The whole page."""
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
