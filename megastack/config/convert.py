"""Plain values into configuration classes, and back, with every fault collected.

The types of the schema are enforced here and only here, alike for YAML files, overrides, interpolations and a stored
configuration. A text that spells a number becomes that number (``'2'`` is 2); nothing else is coerced: ``2.0``,
``true`` and ``two`` are no integers. Whether values make sense together is for ``rules.py``.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, TypeVar, cast

from megastack.config.fields import REQUIRED, hints, keys, without_null
from megastack.config.names import suggest
from megastack.config.schema import TrainConfig
from megastack.errors import Violation

Section = TypeVar("Section")


class UnusableError(Exception):
    """A rule looked at a value that could not be converted, so it has nothing to say."""


class Unusable:
    """Stands for a value that is missing or of the wrong type, so that the rules about other keys can still be asked.

    Every use raises :class:`UnusableError`, which whoever asks the rules takes as "cannot tell".
    """

    def _refuse(self, *_: Any) -> Any:
        raise UnusableError

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _refuse
    __getattr__ = __iter__ = __len__ = __contains__ = __getitem__ = __int__ = __float__ = __str__ = _refuse


UNUSABLE = Unusable()


@dataclass
class Conversion:
    """Turns nested plain values into one configuration object; afterwards ``errors`` lists what was wrong.

    Attributes:
        faults: what was wrong so far.
        strict: a text is no number and no truth value, whatever it spells.
    """

    errors: list[Violation] = field(default_factory=list)
    strict: bool = False

    def section(self, cls: type[Section], values: Mapping[str, Any], prefix: str = "") -> Section:
        """An object of ``cls``, with :data:`UNUSABLE` for each value that is missing or of the wrong type."""
        known = hints(cls)
        for name, value in values.items():
            if name not in known:
                self._unknown(f"{prefix}{name}", value, tuple(prefix + other for other in known))
        found = {
            member.name: self._member(member, known[member.name], values, prefix)
            for member in dataclasses.fields(cls)  # type: ignore[arg-type]
            if member.name in values or _needs_building(member, known[member.name])
        }
        return cls(**found)

    def _member(self, member: dataclasses.Field[Any], kind: Any, values: Mapping[str, Any], prefix: str) -> Any:
        key = prefix + member.name
        if member.name in values:
            return self.value(kind, values[member.name], key)
        return self.section(cast(type, kind), {}, key + ".") if dataclasses.is_dataclass(kind) else self._missing(key)

    def value(self, kind: Any, value: Any, key: str) -> Any:
        """``value`` as the type ``kind``, or :data:`UNUSABLE` with a fault under ``key``."""
        bare, nullable = without_null(kind)
        if value is UNUSABLE:
            return UNUSABLE
        if isinstance(value, str) and value == REQUIRED:
            return self._missing(key)
        if value is None and nullable:
            return None
        if bare is Any:
            return value
        if typing.get_origin(bare) is list:
            return self._list(typing.get_args(bare)[0], value, key)
        if dataclasses.is_dataclass(bare):
            if isinstance(value, Mapping):
                return self.section(cast(type, bare), value, key + ".")
            return self._wrong(key, value, "must be a section of keys", tuple(f"{key}.{name}" for name in hints(bare)))
        if issubclass(bare, StrEnum):
            return self._choice(bare, value, key, nullable)
        return self._scalar(bare, value, key, nullable)

    def _list(self, item: Any, value: Any, key: str) -> Any:
        if not isinstance(value, list | tuple):
            return self._wrong(key, value, "must be a list", (f"[{value}]",) if not isinstance(value, Mapping) else ())
        items = [self.value(item, each, f"{key}[{at}]") for at, each in enumerate(value)]
        return UNUSABLE if any(each is UNUSABLE for each in items) else items

    def _choice(self, kind: type[StrEnum], value: Any, key: str, nullable: bool) -> Any:
        for choice in kind:
            if value == choice.value or isinstance(value, kind):
                return kind(value)
        return self._wrong(key, value, "not one of the choices", (*kind, None) if nullable else tuple(kind))

    def _scalar(self, kind: type, value: Any, key: str, nullable: bool) -> Any:
        read, rule = SCALARS[kind]
        found = read(value)
        misplaced = self.strict and isinstance(value, str) and kind is not str
        if found is not None and not misplaced:
            return found
        advice: tuple[Any, ...] = ("quotes around it",) if kind is str else ()
        if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            advice = (int(value),)
        if misplaced and found is not None:
            advice = (found,)
        if nullable:
            advice += next((each.null_hint for each in keys(TrainConfig) if each.name == key), ())
        return self._wrong(key, value, f"{rule} or null" if nullable else rule, advice)

    def _missing(self, key: str) -> Unusable:
        self.errors.append(Violation(key, REQUIRED, "has to be given and is not", (f"{key}=…",)))
        return UNUSABLE

    def _unknown(self, key: str, value: Any, siblings: tuple[str, ...]) -> None:
        close = suggest(key, siblings if "[" in key else None)
        self.errors.append(Violation(key, value, "no such key", (close,) if close else ()))

    def _wrong(self, key: str, value: Any, rule: str, legal: tuple[Any, ...] = ()) -> Unusable:
        self.errors.append(Violation(key, value, rule, legal))
        return UNUSABLE


def _needs_building(member: dataclasses.Field[Any], kind: Any) -> bool:
    no_default = member.default is dataclasses.MISSING and member.default_factory is dataclasses.MISSING
    return no_default or dataclasses.is_dataclass(kind)


def _integer(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        try:
            return int(value)
        except ValueError:  # more digits than Python converts
            return None
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return None
    try:
        found = float(value.replace("_", "x") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _truth(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    if isinstance(value, str | PurePath):
        return str(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


SCALARS: Mapping[type, tuple[Callable[[Any], Any], str]] = {
    int: (_integer, "must be a whole number"),
    float: (_number, "must be a finite number"),
    bool: (_truth, "must be true or false"),
    str: (_text, "must be text"),
}


def to_plain(config: Any) -> Any:
    """A configuration object as nested dicts, lists and scalars, enumerations as their text."""
    if dataclasses.is_dataclass(config):
        return {member.name: to_plain(getattr(config, member.name)) for member in dataclasses.fields(config)}
    if isinstance(config, StrEnum):
        return str(config)
    if isinstance(config, list | tuple):
        return [to_plain(item) for item in config]
    if isinstance(config, Mapping):
        return {key: to_plain(item) for key, item in config.items()}
    return config


def value_of(config: Any, key: str) -> Any:
    """The value at a dotted key of a configuration object; unusable where what it is part of is.

    Raises:
        KeyError: there is no such key.
    """
    for name in key.split("."):
        if config is UNUSABLE:
            return UNUSABLE
        if not dataclasses.is_dataclass(config) or name not in hints(type(config)):
            raise KeyError(key)
        config = getattr(config, name)
    return config


def replace_values(config: Section, values: Mapping[str, Any]) -> Section:
    """A copy of a configuration object with the values at some dotted keys exchanged.

    Raises:
        KeyError: there is no such key.
    """
    for key, value in values.items():
        value_of(config, key)
        head, _, rest = key.partition(".")
        inner = replace_values(getattr(config, head), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{head: inner})  # type: ignore[type-var]
    return config


def defaults() -> dict[str, Any]:
    """The schema's defaults as nested plain values, ``???`` where a value has to be given."""
    root: dict[str, Any] = {}
    for key in keys(TrainConfig):
        *path, last = key.name.split(".")
        at = root
        for name in path:
            at = at[name]
        at[last] = {} if key.is_section else to_plain(key.default)
    return root
