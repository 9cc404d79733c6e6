"""Which configurations are legal: every rule of every part, asked once before anything starts.

:func:`violations` gives all of them as values; :func:`require_legal` raises them as one report. A rule is a generator
of violations over the configuration and the world size. A key whose value is out of its own range has that said once:
the rules that would compute with it are left out, the others still asked. What needs the file system (paths,
checkpoints) is not asked here, but for the file of a custom schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from megastack.config.availability import not_available
from megastack.config.convert import UNUSABLE, UnusableError, replace_values, value_of
from megastack.config.fields import COMPARISONS, Key, describe_bounds, keys
from megastack.config.layout_rules import LAYOUT_RULES
from megastack.config.phase_rules import PHASE_RULES
from megastack.config.schema import BlendSource, DataPhaseOptions, OptimGroupOptions, TrainConfig
from megastack.config.text_rules import texts_name_something
from megastack.config.typed import typed
from megastack.config.value_rules import VALUE_RULES
from megastack.errors import ConfigError
from megastack.errors import Violation as Violation

Rule = Callable[[TrainConfig, int | None], Iterator[Violation]]

ITEMS = {"optim.groups": OptimGroupOptions, "data.blend": BlendSource, "data.stages": DataPhaseOptions}
"""Lists of sections, and the class of their items."""

RULES: Sequence[Rule] = (not_available, *LAYOUT_RULES, *VALUE_RULES, *PHASE_RULES)


def violations(
    config: TrainConfig, world_size: int | None = None, *, ranks_per_node: int | None = None
) -> list[Violation]:
    """Everything that stands against running this configuration; empty when it is legal.

    Args:
        config: the configuration, also one that was changed after it was composed; values that stand for something
            unusable are passed over.
        world_size: the number of ranks where a launcher has fixed it, None where it follows from the degrees.
        ranks_per_node: what a launcher has started on each node; ``cluster.ranks_per_node`` comes first.
    """
    config, mistyped = typed(config)
    if ranks_per_node is not None and config.cluster.ranks_per_node is None:
        config = replace_values(config, {"cluster.ranks_per_node": ranks_per_node})
    found = [*mistyped, *out_of_range(config), *texts_name_something(config)]
    broken = {violation.key.partition("[")[0] for violation in found}
    usable = replace_values(config, {key: UNUSABLE for key in ORDER if key in broken})
    for rule in RULES:
        found += _ask(rule, usable, world_size)
    return sorted(found, key=lambda violation: ORDER.get(violation.key.partition("[")[0], len(ORDER)))


def require_legal(config: TrainConfig, world_size: int | None = None, *, ranks_per_node: int | None = None) -> None:
    """Nothing for a legal configuration; arguments as for :func:`violations`.

    Raises:
        ConfigError: every violation, a line each.
    """
    if found := violations(config, world_size, ranks_per_node=ranks_per_node):
        raise ConfigError.of(found)


def with_legal_values(config: TrainConfig, *sections: str) -> TrainConfig:
    """The configuration with values of the types of the schema, for who reads only some of its sections or keys.

    Raises:
        ConfigError: a value in them has another type, or is out of its range.
    """
    config, mistyped = typed(config)
    found = [*mistyped, *out_of_range(config)]
    if read := [each for each in found if any(f"{each.key}.".startswith(f"{name}.") for name in sections)]:
        raise ConfigError.of(read)
    return config


def out_of_range(config: TrainConfig) -> Iterator[Violation]:
    """A violation for each number outside the range that its field states."""
    for key in RANGED:
        yield from _range_violations(key.name, key, value_of(config, key.name))
    for name, kind in ITEMS.items():
        yield from _items_out_of_range(name, kind, value_of(config, name))


def _items_out_of_range(name: str, kind: type, items: Any) -> Iterator[Violation]:
    for at, item in enumerate(items if items is not UNUSABLE else ()):
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
        if item is UNUSABLE or item is None or isinstance(item, str):
            continue
        broken = {bound: limit for bound, limit in key.bounds.items() if not COMPARISONS[bound][1](item, limit)}
        if broken:
            rule = f"at most {broken['limit']}" if "limit" in broken else describe_bounds(key.bounds)
            yield Violation(name, value, f"{each}must be {rule}", (*_nearest(broken), *key.null_hint))
            return


def _nearest(broken: Mapping[str, float]) -> tuple[str, ...]:
    """The bound that was passed, where that is itself legal."""
    words = {"least": "more", "most": "less", "limit": "less"}
    return tuple(f"{limit} or {words[bound]}" for bound, limit in broken.items() if bound in words)[:1]


def _ask(rule: Rule, config: TrainConfig, world_size: int | None) -> list[Violation]:
    found = []
    try:
        for violation in rule(config, world_size):
            if violation.value is not UNUSABLE:
                found.append(violation)
    except UnusableError:
        pass  # what the rule found so far stands; of the rest nothing can be said
    return found


RANGED = tuple(key for key in keys(TrainConfig) if key.bounds)
"""The keys that hold numbers: each has a bound."""

ORDER = {key.name: at for at, key in enumerate(keys(TrainConfig))}
"""Where each key stands in the schema; violations are reported in this order."""
