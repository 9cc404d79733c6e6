"""Command-line overrides: sort them into group selections, keys and errors; and expand the jobs of a sweep.

Hydra only overrides keys that a YAML file sets. Here, the schema defines the keys, so ``key=value``, ``+key=value`` and
``++key=value`` all set a key.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megastack.config.convert import given_twice
from megastack.config.fields import RENAMED, current_name, keys
from megastack.config.hydra_session import HydraException, Override, Session, ValueType, session
from megastack.config.schema import TrainConfig
from megastack.config.suggestions import known_keys, suggest
from megastack.errors import ConfigError, Violation


@dataclass
class Overrides:
    """The valid overrides, as passed to Hydra, and the errors of the invalid ones."""

    valid: list[str] = field(default_factory=list)
    errors: list[Violation] = field(default_factory=list)


def read_overrides(overrides: Sequence[str], hydra: Session) -> Overrides:
    """Sort overrides; each invalid override becomes a violation.

    A renamed key may be set under either name, but not under both. An override of it replaces the value that files set
    under either name.
    """
    result, groups = Overrides(), hydra.groups()
    renamed: dict[str, Override] = {}
    for text in overrides:
        try:
            override = hydra.parse(text)
        except (HydraException, ValueError):  # ValueError: a number of thousands of digits
            advice = ("key=value", "group=option") if text.isascii() else ("quotes within quotes: key='\"text\"'",)
            result.errors.append(Violation(*_split(text), "cannot be read", advice))
            continue
        key = override.key_or_group
        error = _error(override, groups, hydra) or _given_twice(override, renamed)
        if error is not None:
            result.errors.append(error)
        elif _is_group(override, groups):
            result.valid.append(text)
        else:
            result.valid += [f"++{old}=[]" for old, new in RENAMED.items() if key in (old, new)]
            result.valid.append("++" + current_name(key) + text.lstrip("+").removeprefix(key))
    return result


def _given_twice(override: Override, renamed: dict[str, Override]) -> Violation | None:
    """Return an error if an earlier override set the key under its other name; ``renamed`` collects the overrides."""
    key = override.key_or_group
    new = current_name(key)
    if new not in RENAMED.values():
        return None
    first = renamed.setdefault(new, override)
    if first.key_or_group == key:
        return None
    old = first if key == new else override
    return given_twice(old.key_or_group, old.value())


def sweep_jobs(overrides: Sequence[str], *, config_dir: str | Path | None = None) -> list[list[str]]:
    """Return the overrides of each job of a sweep: all combinations of values, with the last override varying fastest.

    ``parallel.tp=1,2`` and Hydra's ``choice(…)``, ``range(…)``, ``sort(…)``, ``shuffle(…)`` and ``tag(…)`` have several
    values; ``glob(…)`` selects files of a config group.

    Raises:
        ConfigError: an override cannot be read, a sweep has no values, or there are more than :data:`MOST_JOBS` jobs.
    """
    with session(config_dir) as hydra:
        choices, errors = list[list[str]](), list[Violation]()
        for text in overrides:
            found = _choices(text, hydra)
            if isinstance(found, Violation):
                errors.append(found)
            else:
                choices.append(found)
    if errors:
        raise ConfigError.of(errors)
    jobs = prod(map(len, choices))
    if jobs > MOST_JOBS:
        raise ConfigError(f"-m: the product has {jobs:,} jobs; use at most {MOST_JOBS:,}")
    return [list(job) for job in itertools.product(*choices)]


def _choices(text: str, hydra: Session) -> list[str] | Violation:
    """Return one override for each value of an override."""
    try:
        override = hydra.parse(text)
        if not override.is_sweep_override():
            return [text]
        if override.value_type == ValueType.GLOB_CHOICE_SWEEP and not hydra.options(override.key_or_group):
            return _without_values(text, override, hydra)
        values = list(itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1))
    except (HydraException, ValueError, TypeError, ArithmeticError):  # such as a range with step 0
        return Violation(*_split(text), "cannot be read as a sweep", ("key=1,2", "group=a,b"))
    if len(values) > MOST_JOBS:
        return Violation(*_split(text), f"has more than {MOST_JOBS:,} values")
    if not values:
        return _without_values(text, override, hydra)
    return [f"{override.get_key_element()}={value}" for value in values]


def _without_values(text: str, override: Override, hydra: Session) -> Violation:
    if override.value_type != ValueType.GLOB_CHOICE_SWEEP:
        return Violation(*_split(text), "has no values", ("key=1,2", "group=a,b"))
    key = override.key_or_group
    if options := hydra.options(key):
        return Violation(*_split(text), "no file of this config group matches", tuple(options))
    return Violation(*_split(text), "glob selects files of a config group, and this is not one", (f"{key}=1,2",))


def _error(override: Override, groups: Sequence[str], hydra: Session) -> Violation | None:
    key, value = override.key_or_group, override.value()
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return Violation(key, value, "settings of Hydra are not used", ("run.root", "run.dir", "-m"))
    if override.is_sweep_override():
        _, text = _split(override.input_line or "")
        as_list = () if "(" in text else (f"[{text}] for a list",)
        return Violation(key, text, "has several values", ("-m for a sweep", *as_list))
    if _is_group(override, groups):
        return _group_error(override, key, value, groups, hydra)
    if override.is_delete():
        return Violation("~" + key, value, "a key cannot be removed", (f"{key}=null",))
    if _is_key(key):
        return None
    close = suggest(key)
    return Violation(key, value, "no such key", (close,) if close else ())


def _group_error(
    override: Override, key: str, value: object, groups: Sequence[str], hydra: Session
) -> Violation | None:
    if key not in groups and not hydra.options(key):
        return Violation(key, value, "no such config group", tuple(groups))
    if isinstance(value, Mapping):
        return Violation(key, value, "must be the name of a file in this config group", (f"{key}.KEY=VALUE",))
    if value is None or override.is_delete():
        return None
    options = hydra.options(key)
    missing = [each for each in (value if isinstance(value, list) else [value]) if str(each) not in options]
    return Violation(key, value, "no such file in this config group", tuple(options)) if missing else None


def _is_group(override: Override, groups: Sequence[str]) -> bool:
    key = override.key_or_group
    return "/" in key or key in groups or override.package is not None


def _is_key(key: str) -> bool:
    """Whether the schema has this key, or accepts any key below a part of it.

    Keys below ``schedule`` may be options of a function; if they are not, the conversion of the values rejects them.
    """
    return current_name(key) in known_keys() or any(key.startswith(free + ".") for free in (*FREE_KEYS, "schedule"))


def _split(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


MOST_JOBS = 10_000
"""Maximum number of jobs in a sweep; a larger number is treated as a mistake."""
FREE_KEYS = tuple(key.name for key in keys(TrainConfig) if key.type is Any)
"""Keys that accept any mapping."""
