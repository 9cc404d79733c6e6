"""Overrides as given on a command line: which name a group, which a key, which nothing, and what a sweep of them means.

Hydra refuses to override a key that no YAML file names; here the schema says which keys there are, so a plain
``key=value``, ``+key=value`` and ``++key=value`` all set it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megastack.config.fields import keys
from megastack.config.hydra_session import HydraException, Override, Session, ValueType, session
from megastack.config.names import known_keys, suggest
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError, Violation


@dataclass
class Overrides:
    """Overrides sorted into those that Hydra is given and the faults of the others."""

    legal: list[str] = field(default_factory=list)
    errors: list[Violation] = field(default_factory=list)


def read_overrides(overrides: Sequence[str], hydra: Session) -> Overrides:
    """Sort overrides; each faulty one becomes a violation."""
    result, groups = Overrides(), hydra.groups()
    for text in overrides:
        try:
            override = hydra.parse(text)
        except (HydraException, ValueError):  # ValueError: a number of thousands of digits
            advice = ("key=value", "group=option") if text.isascii() else ("quotes within quotes: key='\"text\"'",)
            result.errors.append(Violation(*_halves(text), "cannot be read", advice))
            continue
        error = _fault(override, groups, hydra)
        if error is None:
            result.legal.append(text if _is_group(override, groups) else "++" + text.lstrip("+"))
        else:
            result.errors.append(error)
    return result


def sweep_jobs(overrides: Sequence[str], *, config_dir: str | Path | None = None) -> list[list[str]]:
    """The overrides of each job of a sweep: the product, as written, of those with several values, the last fastest.

    ``parallel.tp=1,2`` and Hydra's ``choice(…)``, ``range(…)``, ``sort(…)``, ``shuffle(…)`` and ``tag(…)`` have several
    values; ``glob(…)`` chooses files of a config group.

    Raises:
        ConfigError: an override that cannot be read, a sweep without values, or more jobs than :data:`MOST_JOBS`.
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
    """An override once for each of its values."""
    try:
        override = hydra.parse(text)
        if not override.is_sweep_override():
            return [text]
        if override.value_type == ValueType.GLOB_CHOICE_SWEEP and not hydra.options(override.key_or_group):
            return _without_values(text, override, hydra)
        values = list(itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1))
    except (HydraException, ValueError, TypeError, ArithmeticError):  # Python's own, of a range whose step is 0
        return Violation(*_halves(text), "cannot be read as a sweep", ("key=1,2", "group=a,b"))
    if len(values) > MOST_JOBS:
        return Violation(*_halves(text), f"has more than {MOST_JOBS:,} values")
    if not values:
        return _without_values(text, override, hydra)
    return [f"{override.get_key_element()}={value}" for value in values]


def _without_values(text: str, override: Override, hydra: Session) -> Violation:
    if override.value_type != ValueType.GLOB_CHOICE_SWEEP:
        return Violation(*_halves(text), "has no values", ("key=1,2", "group=a,b"))
    key = override.key_or_group
    if options := hydra.options(key):
        return Violation(*_halves(text), "no file of this config group matches", tuple(options))
    return Violation(*_halves(text), "glob chooses files of a config group, and this is none", (f"{key}=1,2",))


def _fault(override: Override, groups: Sequence[str], hydra: Session) -> Violation | None:
    key, value = override.key_or_group, override.value()
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return Violation(key, value, "settings of Hydra are not used", ("run.root", "run.dir", "-m"))
    if override.is_sweep_override():
        _, text = _halves(override.input_line or "")
        as_list = () if "(" in text else (f"[{text}] for a list",)
        return Violation(key, text, "has several values", ("-m for a sweep", *as_list))
    if _is_group(override, groups):
        return _group_error(override, key, value, groups, hydra)
    if override.is_delete():
        return Violation("~" + key, value, "a key cannot be taken away", (f"{key}=null",))
    if _is_key(key):
        return None
    close = suggest(key)
    return Violation(key, value, "no such key", (close,) if close else ())


def _group_error(override: Override, key: str, value: Any, groups: Sequence[str], hydra: Session) -> Violation | None:
    if key not in groups and not hydra.options(key):
        return Violation(key, value, "no such config group", tuple(groups))
    if isinstance(value, Mapping):
        return Violation(
            key, value, "a section is chosen by a file of its group or set key by key", (f"{key}.KEY=VALUE",)
        )
    if value is None or override.is_delete():
        return None
    options = hydra.options(key)
    missing = [each for each in (value if isinstance(value, list) else [value]) if str(each) not in options]
    return Violation(key, value, "no such file in this config group", tuple(options)) if missing else None


def _is_group(override: Override, groups: Sequence[str]) -> bool:
    key = override.key_or_group
    return "/" in key or key in groups or override.package is not None


def _is_key(key: str) -> bool:
    """Whether the schema has this key, or lets anything stand beneath it."""
    return key in known_keys() or any(key.startswith(free + ".") for free in FREE_KEYS)


def _halves(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


MOST_JOBS = 10_000
"""Jobs of a sweep; more is a mistake, not a plan."""
FREE_KEYS = tuple(key.name for key in keys(TrainConfig) if key.type is Any)
"""Keys whose value is any mapping."""
