"""Validation of a configuration: every rule of every section, checked before anything starts.

:func:`violations` returns every violation as a value. A rule is a generator of violations. A value of the wrong type or
out of range is reported once and then marked invalid, so checks that depend on it are skipped while all others still
run. Nothing here accesses paths or checkpoints, except for the file of a custom schedule.

:data:`WORKS` lists the supported values of keys whose other values need features that are not implemented yet. The
schema already contains these keys, so configurations and documentation will not change; implementing a feature removes
its entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from megastack.config.convert import INVALID, InvalidValueError, coerce, replace_values, value_of
from megastack.config.data_schema import BlendSource, DataPhaseOptions
from megastack.config.fields import COMPARISONS, Key, describe_bounds, keys
from megastack.config.layout_rules import LAYOUT_RULES, Degrees, batch_fits
from megastack.config.phases import PHASE_RULES
from megastack.config.schema import OptimGroupOptions, TrainConfig
from megastack.config.value_rules import VALUE_RULES, invalid_texts
from megastack.errors import ConfigError, Violation, counted, spell

ITEMS = {"optim.groups": OptimGroupOptions, "data.blend": BlendSource, "data.phases": DataPhaseOptions}
"""Keys that contain lists of sections, and the class of their items."""

WORKS: Mapping[str, tuple[object, ...]] = {
    "parallel.cp": (1,),
    "parallel.ep": (1,),
    "schedule.memory_limit": (None,),
    "observe.trace_steps": ([],),
}
"""The supported values, by key; a key that is not listed accepts every value of its type and range."""


def violations(
    config: TrainConfig, world_size: int | None = None, *, ranks_per_node: int | None = None
) -> list[Violation]:
    """Return every rule violation of a configuration, in schema order; empty for a valid configuration.

    Args:
        config: the configuration, possibly changed after it was composed; values marked invalid are skipped.
        world_size: ranks started by a launcher; None if the world size follows from the degrees.
        ranks_per_node: ranks that a launcher started on each node; ``cluster.ranks_per_node`` takes precedence.
    """
    config, mistyped = coerce(config)
    if ranks_per_node is not None and config.cluster.ranks_per_node is None:
        config = replace_values(config, {"cluster.ranks_per_node": ranks_per_node})
    found = [*mistyped, *out_of_range(config), *invalid_texts(config)]
    invalid = {violation.key.partition("[")[0] for violation in found}
    config = replace_values(config, {key: INVALID for key in ORDER if key in invalid})
    degrees = Degrees(config, world_size)
    unavailable = {violation.key: violation for violation in not_available(config)}
    others = _collect(
        [
            *(partial(rule, config, degrees) for rule in LAYOUT_RULES),
            *(partial(rule, config) for rule in (*VALUE_RULES, *PHASE_RULES)),
        ]
    )
    found += [*unavailable.values(), *(violation for violation in others if violation.key not in unavailable)]
    return sorted(found, key=lambda violation: ORDER.get(violation.key.partition("[")[0], len(ORDER)))


def _collect(rules: Iterable[Callable[[], Iterator[Violation]]]) -> Iterator[Violation]:
    """Yield the violations that the rules report; a rule that reads an invalid value stops there."""
    for rule in rules:
        try:
            yield from (violation for violation in rule() if violation.value is not INVALID)
        except InvalidValueError:
            continue


def validate_sections(config: TrainConfig, *sections: str) -> TrainConfig:
    """Check types and ranges in some sections or keys; return the configuration with coerced values.

    Raises:
        ConfigError: a value in these sections has the wrong type or is out of range.
    """
    config, mistyped = coerce(config)
    found = [*mistyped, *out_of_range(config)]
    if read := [each for each in found if any(f"{each.key}.".startswith(f"{name}.") for name in sections)]:
        raise ConfigError.of(read)
    return config


def not_available(config: TrainConfig) -> Iterator[Violation]:
    """Yield a violation for each key that selects a feature that is not implemented yet."""
    for key, works in WORKS.items():
        value = value_of(config, key)
        if value is not INVALID and value not in works:
            yield Violation(key, value, "not available yet", works)


def out_of_range(config: TrainConfig) -> Iterator[Violation]:
    """Yield a violation for each number outside the range of its key."""
    for key in RANGED:
        yield from _range_violations(key.name, key, value_of(config, key.name))
    for name, kind in ITEMS.items():
        yield from _items_out_of_range(name, kind, value_of(config, name))


def _items_out_of_range(name: str, kind: type, items: Any) -> Iterator[Violation]:
    for at, item in enumerate(items if items is not INVALID else ()):
        for key in keys(kind):
            value, inner = value_of(item, key.name), f"{name}[{at}].{key.name}"
            if isinstance(value, list) and value and is_dataclass(value[0]):
                yield from _items_out_of_range(inner, type(value[0]), value)
            else:
                yield from _range_violations(inner, key, value)


def _range_violations(name: str, key: Key, value: Any) -> Iterator[Violation]:
    for item in value if isinstance(value, list) else [value]:
        each = "each " if isinstance(value, list) else ""
        if isinstance(item, float) and not math.isfinite(item):
            yield Violation(name, value, f"{each}must be a finite number", key.null_hint)
            return
        if item is INVALID or item is None or isinstance(item, str):
            continue
        broken = {bound: limit for bound, limit in key.bounds.items() if not COMPARISONS[bound][1](item, limit)}
        if broken:
            rule = f"at most {broken['limit']}" if "limit" in broken else describe_bounds(key.bounds)
            yield Violation(name, value, f"{each}must be {rule}", (*_nearest(broken), *key.null_hint))
            return


def _nearest(broken: Mapping[str, float]) -> tuple[str, ...]:
    """Return the bound that was exceeded, if the bound itself is valid."""
    words = {"least": "more", "most": "less", "limit": "less"}
    return tuple(f"{limit} or {words[bound]}" for bound, limit in broken.items() if bound in words)[:1]


RANGED = tuple(key for key in keys(TrainConfig) if key.bounds)
"""Keys with numeric values, each of which has a bound."""

ORDER = {key.name: at for at, key in enumerate(keys(TrainConfig))}
"""Position of each key in the schema."""

MOST_REASONS = 3
"""Maximum number of degrees for which an error lists the reasons."""


def fit_data_parallel(config: TrainConfig, ranks: int) -> TrainConfig:
    """Set ``parallel.dp`` to the largest valid degree for a number of ranks; some ranks may stay unused.

    An elastic job keeps tp, pp, cp and the global batch. Its data-parallel degree depends on the number of ranks, and
    so does the number of microbatches that each rank accumulates.

    Args:
        config: the configuration; its ``parallel.dp`` is the upper limit, null for no limit.
        ranks: the number of ranks started.

    Raises:
        ConfigError: no degree is valid; the message lists the reasons.
    """
    if list(out_of_range(config)):
        raise ConfigError.of(violations(config))
    replica, limit = Degrees(config, None).replica_ranks, config.parallel.dp
    candidates = range(min(ranks // replica, ranks if limit is None else limit), 0, -1)
    if not candidates:
        rule = f"the {counted(ranks, 'rank')} of this start cannot hold pp·cp·tp = {replica}"
        raise ConfigError.of([Violation("launch.elastic", True, rule, (f"{replica} ranks or more", "other degrees"))])
    for dp in candidates:
        fitted = replace_values(config, {"parallel.dp": dp})
        if not list(batch_fits(fitted, Degrees(fitted, None))) and not violations(fitted, dp * replica):
            return fitted
    raise ConfigError.of(_reasons(config, candidates, replica, ranks))


def _reasons(config: TrainConfig, candidates: Sequence[int], replica: int, ranks: int) -> list[Violation]:
    """Return the violations shared by all candidates; if each has others too, one more violation lists some of them."""
    sample = [*candidates[: MOST_REASONS - 1], candidates[-1]]
    found = {dp: violations(replace_values(config, {"parallel.dp": dp}), dp * replica) for dp in sample}
    shared = [error for error in found[sample[-1]] if all(error in errors for errors in found.values())]
    others = {dp: [error for error in errors if error not in shared] for dp, errors in found.items()}
    if not all(others.values()):
        return shared
    first = {dp: errors[0] for dp, errors in others.items()}
    reasons = "; ".join(f"dp={dp}: {error.key}={spell(error.value)} {error.rule}" for dp, error in first.items())
    rule = f"no dp from {candidates[-1]} to {candidates[0]} is valid on {counted(ranks, 'rank')} ({reasons})"
    return [*shared, Violation("launch.elastic", True, rule, ("another number of ranks", "other values of these keys"))]
