"""Convert plain values to configuration classes and back, and collect every error.

Schema types are enforced only here, in the same way for YAML files, overrides, interpolations and recorded
configurations. Text that spells a number becomes that number (``'2'`` is 2); nothing else is coerced: ``2.0``, ``true``
and ``two`` are not integers. ``rules.py`` checks whether values are consistent. Does not import torch.
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

from megastack.config.choices import Device
from megastack.config.fields import RENAMED, REQUIRED, hints, keys, without_null
from megastack.config.schema import ScheduleOptions, TrainConfig
from megastack.config.suggestions import suggest
from megastack.errors import ConfigError, Violation

Section = TypeVar("Section")


class InvalidValueError(Exception):
    """Raised when a check uses an invalid value, so that its result is unknown."""


class InvalidValue:
    """Placeholder for a value that is missing or has the wrong type, so that other keys can still be checked.

    Every use raises :class:`InvalidValueError`; checks that raise it are skipped.
    """

    def _raise(self, *_: object) -> Any:
        raise InvalidValueError

    __bool__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
    __mod__ = __rmod__ = __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _raise
    __getattr__ = __iter__ = __len__ = __contains__ = __getitem__ = __int__ = __float__ = __str__ = _raise


INVALID = InvalidValue()


@dataclass
class Conversion:
    """Converts nested plain values to a configuration object and collects the errors.

    Attributes:
        errors: the errors so far.
        strict: if True, text is not converted to numbers or booleans.
    """

    errors: list[Violation] = field(default_factory=list)
    strict: bool = False

    def section(self, cls: type[Section], values: Mapping[str, object], prefix: str = "") -> Section:
        """Build an object of ``cls``, with :data:`INVALID` for each value that is missing or has the wrong type."""
        known, values = hints(cls), _collect_options(cls, values)
        for name, value in values.items():
            if name not in known:
                self._unknown(f"{prefix}{name}", value, tuple(prefix + other for other in known))
        found = {
            member.name: self._member(member, known[member.name], values, prefix)
            for member in dataclasses.fields(cls)  # type: ignore[arg-type]
            if member.name in values or _is_always_set(member, known[member.name])
        }
        return cls(**found)

    def _member(self, member: dataclasses.Field[Any], kind: Any, values: Mapping[str, object], prefix: str) -> Any:
        key = prefix + member.name
        if member.name in values:
            return self.value(kind, values[member.name], key)
        return self.section(cast(type, kind), {}, key + ".") if dataclasses.is_dataclass(kind) else self._missing(key)

    def value(self, kind: Any, value: object, key: str) -> Any:
        """Convert ``value`` to the type ``kind``; :data:`INVALID`, with an error under ``key``, if that fails."""
        bare, nullable = without_null(kind)
        if value is INVALID:
            return INVALID
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

    def _list(self, item: Any, value: object, key: str) -> Any:
        if not isinstance(value, list | tuple):
            return self._wrong(key, value, "must be a list", _as_list(item, value))
        items = [self.value(item, each, f"{key}[{at}]") for at, each in enumerate(value)]
        return INVALID if any(each is INVALID for each in items) else items

    def _choice(self, kind: type[StrEnum], value: object, key: str, nullable: bool) -> Any:
        for choice in kind:
            if value == choice.value or isinstance(value, kind):
                return kind(value)
        rule = CHOICE_RULES.get(kind, "must be one of the choices")
        return self._wrong(key, value, rule, (*kind, None) if nullable else tuple(kind))

    def _scalar(self, kind: type, value: object, key: str, nullable: bool) -> Any:
        read, rule = SCALARS[kind]
        found = read(value)
        misplaced = self.strict and isinstance(value, str) and kind is not str
        if found is not None and not misplaced:
            return found
        advice: tuple[object, ...] = ("quotes around it",) if kind is str else ()
        if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            advice = (int(value),)
        if misplaced and found is not None:
            advice = (found,)
        if nullable:
            advice += next((each.null_hint for each in keys(TrainConfig) if each.name == key), ())
        return self._wrong(key, value, f"{rule} or null" if nullable else rule, advice)

    def _missing(self, key: str) -> InvalidValue:
        self.errors.append(Violation(key, REQUIRED, "must be set", (f"{key}=…",)))
        return INVALID

    def _unknown(self, key: str, value: object, siblings: tuple[str, ...]) -> None:
        close = suggest(key, siblings if "[" in key else None)
        self.errors.append(Violation(key, value, "no such key", (close,) if close else ()))

    def _wrong(self, key: str, value: object, rule: str, legal: tuple[object, ...] = ()) -> InvalidValue:
        self.errors.append(Violation(key, value, rule, legal))
        return INVALID


def _as_list(item: Any, value: object) -> tuple[object, ...]:
    """Return the list that was probably meant by a value that is not one; empty if its items would be invalid."""
    if value is None:
        return ([],)
    if isinstance(value, Mapping):
        return ()
    parts = value.split(",") if isinstance(value, str) and item is not str else [value]
    trial = Conversion()
    items = [trial.value(item, part, "") for part in parts]
    return () if trial.errors else (items,)


def _collect_options(cls: type, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a section; keys next to the ``_target_`` of a schedule become its options."""
    if cls is not ScheduleOptions or values.get("_target_") is None:
        return values
    own = {name: value for name, value in values.items() if name not in hints(cls)}
    given = values.get("options")
    options = own or None if given is None else {**given, **own} if isinstance(given, Mapping) else given
    return {name: value for name, value in values.items() if name not in own} | {"options": options}


def _is_always_set(member: dataclasses.Field[Any], kind: object) -> bool:
    """Whether a member is constructed even when no value is given: sections and required values."""
    no_default = member.default is dataclasses.MISSING and member.default_factory is dataclasses.MISSING
    return no_default or dataclasses.is_dataclass(kind)


def _integer(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
        try:
            return int(value)
        except ValueError:  # more digits than Python converts
            return None
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        return None
    try:
        found = float(value.replace("_", "x") if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def _truth(value: object) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _text(value: object) -> str | None:
    if isinstance(value, str | PurePath):
        return str(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


CHOICE_RULES: Mapping[type[StrEnum], str] = {
    Device: "must be a kind of device; the environment variable CUDA_VISIBLE_DEVICES selects GPUs by number"
}
"""The rules of choices that need an explanation."""

SCALARS: Mapping[type, tuple[Callable[[object], object], str]] = {
    int: (_integer, "must be a whole number"),
    float: (_number, "must be a finite number"),
    bool: (_truth, "must be true or false"),
    str: (_text, "must be text"),
}


def with_current_names(values: Mapping[str, object]) -> tuple[dict[str, object], list[Violation]]:
    """Rename keys in nested plain values to their current names; return an error for each key given under both names.

    An empty list under the old name does not count as given: recorded configurations contain every default.
    """
    found, errors = dict(values), list[Violation]()
    for old, new in RENAMED.items():
        section, _, old_name = old.partition(".")
        inner, new_name = found.get(section), new.partition(".")[2]
        if not isinstance(inner, Mapping) or old_name not in inner:
            continue
        given = inner[old_name]
        if new_name in inner and given != []:
            errors.append(given_twice(old, given))
        renamed = {new_name: given} | {name: value for name, value in inner.items() if name != old_name}
        found[section] = renamed
    return found, errors


def given_twice(old: str, value: object) -> Violation:
    """Return the error for a renamed key that is set under both names."""
    rule = f"must not be given together with {RENAMED[old]}, its present name"
    return Violation(old, value, rule, (f"{RENAMED[old]} only",))


def to_plain(config: Any) -> Any:
    """Convert a configuration object to nested dicts, lists and scalars; enumeration members become text."""
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
    """Return the value at a dotted key of a configuration object; :data:`INVALID` if its section is invalid.

    Raises:
        KeyError: there is no such key.
    """
    for name in key.split("."):
        if config is INVALID:
            return INVALID
        if not dataclasses.is_dataclass(config) or name not in hints(type(config)):
            raise KeyError(key)
        config = getattr(config, name)
    return config


def replace_values(config: Section, values: Mapping[str, object]) -> Section:
    """Return a copy of a configuration object with the values at some dotted keys replaced.

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
    """Return the schema's defaults as nested plain values; ``???`` for required values."""
    root: dict[str, Any] = {}
    for key in keys(TrainConfig):
        *path, last = key.name.split(".")
        at = root
        for name in path:
            at = at[name]
        at[last] = {} if key.is_section else to_plain(key.default)
    return root


def coerce(config: object) -> tuple[TrainConfig, list[Violation]]:
    """Convert each value of a configuration changed in Python to its key's type, and collect the errors.

    ``dataclasses.replace`` does not check types. Every function that accepts a configuration from a user calls this
    first, so that a value of the wrong type is an error under its key, as in a YAML file. NumPy numbers, tuples, paths
    and the names of choices are converted; text that spells a number is not. A value that cannot be converted becomes
    :data:`INVALID`.

    Raises:
        ConfigError: the argument is not a :class:`TrainConfig`.
    """
    if not isinstance(config, TrainConfig):
        rule = "must be a TrainConfig"
        raise ConfigError.of([Violation("config", type(config).__name__, rule, ("megastack.compose(overrides)",))])
    conversion = Conversion(strict=True)
    return conversion.section(TrainConfig, to_plain(config)), conversion.errors
