"""Extreme numbers at every numeric key are errors under that key or pass every check before launch."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from megastack.config.compose import compose_partial
from megastack.config.convert import Conversion, replace_values, to_plain, value_of
from megastack.config.fields import Key, keys, without_null
from megastack.config.rules import ITEMS, RANGED, violations
from megastack.config.schema import TrainConfig
from megastack.errors import spell
from megastack.plan.describe import short
from megastack.preflight.checks import ErrorCollector, ask_data, ask_model
from megastack.testing.training import composed
from tests.tiny_runs import train

EXTREMES = (1e300, -1e300, math.inf, -math.inf, math.nan, 5e-324, -1, 0, 1, 2**31, 2**53, 2**63, 2**200, -(2**200))
"""Tried at every key."""


def number_of(kind: Any) -> type | None:
    """int or float where a key holds it, or a list of it."""
    bare, _ = without_null(kind)
    item = typing.get_args(bare)[0] if typing.get_origin(bare) is list else bare
    return item if item in (int, float) else None


def items(name: str, kind: type) -> Iterator[tuple[str, Key]]:
    """The keys of the items of a list of sections."""
    for key in keys(kind):
        bare, _ = without_null(key.type)
        inner = typing.get_args(bare)[0] if typing.get_origin(bare) is list else None
        if is_dataclass(inner):
            yield from items(f"{name}.{key.name}", typing.cast(type, inner))
        else:
            yield f"{name}.{key.name}", key


NUMERIC = {key.name: key for key in keys(TrainConfig) if number_of(key.type)}
IN_LISTS = {name: key for of, kind in ITEMS.items() for name, key in items(of, kind) if number_of(key.type)}


@pytest.mark.parametrize("key", [*NUMERIC.values(), *IN_LISTS.values()], ids=[*NUMERIC, *IN_LISTS])
def test_every_number_has_a_lower_and_an_upper_bound(key: Key) -> None:
    assert {"least", "above"} & key.bounds.keys() and {"most", "below", "limit"} & key.bounds.keys()
    assert all(math.isfinite(bound) for bound in key.bounds.values())


def test_every_numeric_key_is_tested() -> None:
    assert set(NUMERIC) == {key.name for key in RANGED}
    assert {"optim.groups.lr_scale", "data.blend.weight", "data.phases.from_step", "data.phases.blend.weight"} <= set(
        IN_LISTS
    )


BASE = [
    *("run.steps=10", "batch.global_size=4", "batch.sequence_length=8", "model.layers=2", "model.heads=4"),
    *("model.hidden=16", "model.ffn=32", "model.vocab=256", "model.kv_groups=4", "data.validation_fraction=0"),
]


@pytest.fixture(scope="module")
def base() -> TrainConfig:
    return composed(BASE)


def fitting(key: Key, value: Any) -> Any:
    """The value as the key's type holds it, a list for a list."""
    bare, _ = without_null(key.type)
    return [value] if typing.get_origin(bare) is list else value


def look(config: TrainConfig, name: str) -> None:
    """The checks of a valid configuration before launch that depend on a key."""
    errors = ErrorCollector()
    if name.startswith(("model.", "optim.", "precision.")):
        ask_model(config, errors)
    if name.startswith(("data.", "batch.", "model.vocab")):
        ask_data(config, errors)
    short(config, None)


@pytest.mark.parametrize("name", NUMERIC)
def test_extreme_values_are_rejected_by_key_or_accepted(base: TrainConfig, name: str) -> None:
    """Values that the key's type can hold; a rule about several keys may report another key."""
    for value in EXTREMES:
        if number_of(NUMERIC[name].type) is int and isinstance(value, float):
            continue
        config = replace_values(base, {name: fitting(NUMERIC[name], value)})
        found = violations(config)
        assert all(str(violation) for violation in found)
        if not found:
            assert math.isfinite(value), f"{name}={value}"
            look(config, name)


ITEM = {
    "optim.groups": {"pattern": "norm"},
    "data.blend": {"paths": ["a"], "weight": 1},
    "data.phases": {"from_step": 1, "sequence_length": 4},
    "data.phases.blend": {"paths": ["a"], "weight": 1},
}


@pytest.mark.parametrize("name", IN_LISTS)
def test_extreme_values_in_lists_are_rejected_by_key_or_accepted(base: TrainConfig, name: str) -> None:
    of, _, last = name.rpartition(".")
    for value in EXTREMES:
        item = ITEM[of] | {last: value}
        if of == "data.phases.blend":
            item, of_list = {"from_step": 1, "blend": [item]}, "data.phases"
        else:
            of_list = of
        plain, conversion = to_plain(base), Conversion()
        section, _, key = of_list.partition(".")
        plain[section][key] = [item]
        config = conversion.section(TrainConfig, plain)
        found = [*conversion.errors, *violations(config)]
        where = re.sub(r"\.(?=[^.]+$)", r"[0].", name).replace("phases.blend", "phases[0].blend")
        rejected = any(violation.key == where for violation in found)
        assert rejected or (math.isfinite(value) and abs(value) <= 1e15), f"{name}={value}"


SPELT = ("1e400", "-1e400", "nan", ".inf", "0x10", "1_000", "9" * 400, "9" * 5000, "1e300", "-1", "0", str(2**63))


@pytest.mark.parametrize("text", SPELT, ids=[text[:8] for text in SPELT])
def test_extreme_values_on_the_command_line_are_reported_together(text: str) -> None:
    """All numeric keys at once: a key that is not in the report was read as a number in range."""
    values = {name: spell(fitting(key, text)) for name, key in NUMERIC.items()}
    given = compose_partial([*BASE, *(f"{name}={value}" for name, value in values.items())])
    named = {error.key.partition("[")[0] for error in (*given.errors, *violations(given.config))}
    for name in NUMERIC.keys() - named:
        value = value_of(given.config, name)
        number = value[0] if isinstance(value, list) else value
        assert math.isfinite(number) and abs(number) <= 2**63, f"{name}={value}"
    if text not in ("0", "1_000", "-1"):
        assert NUMERIC.keys() - named <= {"optim.clip_norm"}


def test_a_run_at_its_limits_starts_and_ends(tmp_path: Path) -> None:
    """Times and seeds at the limits of their ranges, on two ranks, through every call with a time-out."""
    names = ("launch.timeout_s", "launch.grace_s", "run.time_limit_s", "seed", "lr.warmup_steps", "lr.total_steps")
    limits = [f"{name}={NUMERIC[name].bounds['limit']}" for name in (*names, "optim.clip_norm", "checkpoint.every")]
    assert train(tmp_path, "run.steps=1", "parallel.dp=2", *limits) == 0
