"""Configuration fields: how the schema declares a key's default, meaning and range, and how they are read back.

The reference page, ``megastack show KEY`` and the range checks use the metadata that :func:`option` and
:func:`required` store in a field. :func:`keys` lists the keys of a configuration class, nested ones by dotted name.
:data:`RENAMED` lists keys that are also accepted under an older name. Not for dataclasses in general.
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
"""Placeholder for a required value, as written in YAML and in the reference."""

RENAMED: Mapping[str, str] = {"data.stages": "data.phases"}
"""Maps older names of keys, which are still accepted, to their current names."""

COMPARISONS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "least": ("at least", lambda value, bound: value >= bound),
    "above": ("above", lambda value, bound: value > bound),
    "most": ("at most", lambda value, bound: value <= bound),
    "below": ("below", lambda value, bound: value < bound),
    "limit": ("at most", lambda value, bound: value <= bound),
}
"""Each kind of bound: its wording, and a predicate on a value."""

LIMITS: Mapping[object, float] = {int: 10**11, float: 1e6}
"""Upper limit, by type, of a number whose field has no upper bound. Within these limits, steps times the largest batch
fits in int64, and scaling by a million does not overflow half precision or a time."""


def option(default: Any, doc: str, **bounds: float) -> Any:
    """Define a field with a default.

    Args:
        default: the value if neither YAML nor the command line sets the key; a list is copied, a class is called.
        doc: the meaning of the key, with its unit.
        bounds: ``least`` (value ≥), ``above`` (value >), ``most`` (value ≤), ``below`` (value <); they apply to each
            item of a list and not to null. ``limit`` is an upper bound that only prevents overflow and is not
            documented; a number without ``most``, ``below`` or ``limit`` has the limit of its type in :data:`LIMITS`.
            ``rules.py`` checks them.
    """
    metadata = {"doc": doc, "bounds": bounds}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def required(doc: str, **bounds: float) -> Any:
    """Define a field without a default: a YAML file or an override must set it."""
    return field(metadata={"doc": doc, "bounds": bounds})


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Args:
        name: the dotted key, e.g. ``parallel.zero.stage``.
        type: the resolved type hint.
        default: the default, ``???`` if there is none; for a section, the section's class.
        doc: the meaning of the key.
        bounds: the range, see :func:`option`.
    """

    name: str
    type: Any
    default: Any
    doc: str
    bounds: Mapping[str, float]

    @property
    def null_hint(self) -> tuple[str, ...]:
        """The meaning of null if the documentation states it, such as ``null for no limit``; otherwise empty."""
        return tuple(re.findall(r"\bnull for [^.;,]+", self.doc)[:1])

    @property
    def is_section(self) -> bool:
        """Whether the key is a section of keys rather than a value."""
        return dataclasses.is_dataclass(self.type)


def hints(cls: Any) -> Mapping[str, Any]:
    """Return the resolved type hints of a dataclass."""
    return _hints(cls)


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Yield every key of a configuration class in order, each section before its members."""
    for member in dataclasses.fields(cls):
        kind = hints(cls)[member.name]
        name = prefix + member.name
        doc, bounds = member.metadata["doc"], _limited(member.metadata["bounds"], kind)
        yield Key(name, kind, _default(member, kind), doc, bounds)
        if dataclasses.is_dataclass(kind):
            yield from keys(typing.cast(type, kind), name + ".")


def current_name(key: str) -> str:
    """Return the current name of a dotted key that is, or is nested in, a renamed key; other keys are unchanged."""
    for old, new in RENAMED.items():
        if key == old or key.startswith((old + ".", old + "[")):
            return new + key.removeprefix(old)
    return key


def _limited(bounds: Mapping[str, float], kind: Any) -> Mapping[str, float]:
    """Return the bounds of a field, with an upper limit if it is a number or a list of numbers."""
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
    """Return a type hint without its ``| None``, and whether it had one."""
    if isinstance(kind, types.UnionType):
        [only] = [member for member in typing.get_args(kind) if member is not types.NoneType]
        return only, True
    return kind, kind is Any


def describe_type(kind: Any) -> str:
    """Describe a type in words: ``int``, ``list of int or null``, ``a, b or c``."""
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
    """Describe a range in words: ``at least 0 and below 1``; empty without bounds. A ``limit`` is not included."""
    stated = {bound: limit for bound, limit in bounds.items() if bound != "limit"}
    return " and ".join(f"{COMPARISONS[bound][0]} {limit}" for bound, limit in stated.items())
