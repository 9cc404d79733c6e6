"""How a configuration field is written: its default, its meaning and its range beside its type.

A field made here carries everything the reference page, ``megastack show KEY`` and the range checks need. Not for
``dataclasses.field`` in general: classes that are no configuration use that directly.
"""

from __future__ import annotations

from dataclasses import field
from enum import StrEnum
from typing import Any


def option(default: Any, doc: str, **bounds: float) -> Any:
    """A field with a default.

    Args:
        default: the value when neither YAML nor the command line names the key; a list is copied, a class is called.
        doc: its meaning, with the unit.
        bounds: ``least`` (value ≥), ``above`` (value >), ``most`` (value ≤), ``below`` (value <); applied to each item
            of a list, not to null. Checked by ``rules.py``.
    """
    metadata = {"doc": doc, "bounds": bounds}
    if isinstance(default, type) and not issubclass(default, StrEnum):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(doc: str, **bounds: float) -> Any:
    """A field without a default: some YAML file or override has to name it."""
    return field(metadata={"doc": doc, "bounds": bounds})
