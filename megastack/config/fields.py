"""How a configuration field is written and read back: default, meaning and range beside its type.

A field made by :func:`option` or :func:`required` carries everything the reference page, ``megastack show KEY`` and
the range checks need; :func:`keys` lists all of a class's fields, nested ones by dotted key. Not for dataclasses in
general.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any

REQUIRED = "???"
"""How a value that has to be given is written, in YAML and in the reference."""

COMPARISONS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "least": ("at least", lambda value, bound: value >= bound),
    "above": ("above", lambda value, bound: value > bound),
    "most": ("at most", lambda value, bound: value <= bound),
    "below": ("below", lambda value, bound: value < bound),
    "limit": ("at most", lambda value, bound: value <= bound),
}
"""Each kind of bound in words, and whether a value keeps it."""

LIMITS: Mapping[Any, float] = {int: 10**11, float: 1e6}
"""The limit of a number whose field states no upper bound, by type. So many steps of the largest batch are a number of
samples that int64 holds, and no half precision or time overflows by a factor of a million."""


def option(default: Any, doc: str, **bounds: float) -> Any:
    """A field with a default.

    Args:
        default: the value when neither YAML nor the command line names the key; a list is copied, a class is called.
        doc: its meaning, with the unit.
        bounds: ``least`` (value ≥), ``above`` (value >), ``most`` (value ≤), ``below`` (value <); applied to each item
            of a list, not to null. ``limit`` is a ``most`` without a meaning of its own: what lies beyond it would
            overflow somewhere; a number without ``most``, ``below`` or ``limit`` has that of :data:`LIMITS`. Checked by
            ``rules.py``.
    """
    metadata = {"doc": doc, "bounds": bounds}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(doc: str, **bounds: float) -> Any:
    """A field without a default: some YAML file or override has to name it."""
    return field(metadata={"doc": doc, "bounds": bounds})


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Args:
        name: the dotted key, e.g. ``parallel.zero.stage``.
        type: its resolved type hint.
        default: its default, ``???`` where there is none; for a section, the section's class.
        doc: its meaning.
        bounds: its range, see :func:`option`.
    """

    name: str
    type: Any
    default: Any
    doc: str
    bounds: Mapping[str, float]

    @property
    def null_hint(self) -> tuple[str, ...]:
        """What null is for, as its meaning says it: ``null for no limit``; empty where it does not."""
        return tuple(re.findall(r"\bnull for [^.;,]+", self.doc)[:1])

    @property
    def is_section(self) -> bool:
        """Whether this is a group of keys and no value."""
        return dataclasses.is_dataclass(self.type)


def hints(cls: Any) -> Mapping[str, Any]:
    """The resolved type hints of a dataclass."""
    return _hints(cls)


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a configuration class in order, each section before its members."""
    for member in dataclasses.fields(cls):
        kind = hints(cls)[member.name]
        name = prefix + member.name
        doc, bounds = member.metadata["doc"], _limited(member.metadata["bounds"], kind)
        yield Key(name, kind, _default(member, kind), doc, bounds)
        if dataclasses.is_dataclass(kind):
            yield from keys(typing.cast(type, kind), name + ".")


def _limited(bounds: Mapping[str, float], kind: Any) -> Mapping[str, float]:
    """The bounds of a field, with an upper one if it is a number or a list of numbers."""
    bare, _ = without_null(kind)
    item = typing.get_args(bare)[0] if typing.get_origin(bare) is list else bare
    if item not in LIMITS or {"most", "below", "limit"} & bounds.keys():
        return bounds
    return {**bounds, "limit": LIMITS[item]}


def _default(member: dataclasses.Field[Any], kind: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return kind
    if member.default is not dataclasses.MISSING:
        return member.default
    return member.default_factory() if member.default_factory is not dataclasses.MISSING else REQUIRED


def without_null(kind: Any) -> tuple[Any, bool]:
    """A type hint without its ``| None``, and whether it had one."""
    if isinstance(kind, types.UnionType):
        [only] = [member for member in typing.get_args(kind) if member is not types.NoneType]
        return only, True
    return kind, kind is Any


def describe_type(kind: Any) -> str:
    """A type as the reference page writes it: ``int``, ``list of int or null``, ``a, b or c``."""
    bare, nullable = without_null(kind)
    if bare is Any:
        return "mapping or null"
    if typing.get_origin(bare) is list:
        text = f"list of {describe_type(typing.get_args(bare)[0])}"
    elif dataclasses.is_dataclass(bare):
        text = "{" + ", ".join(hints(typing.cast(type, bare))) + "}"
    elif issubclass(bare, StrEnum):
        text = ", ".join(bare)
    else:
        text = str(bare.__name__)
    return f"{text} or null" if nullable else text


def describe_bounds(bounds: Mapping[str, float]) -> str:
    """A range in words: ``at least 0 and below 1``; empty where there is none, and without a mere limit."""
    stated = {bound: limit for bound, limit in bounds.items() if bound != "limit"}
    return " and ".join(f"{COMPARISONS[bound][0]} {limit}" for bound, limit in stated.items())
