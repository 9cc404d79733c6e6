"""Plain values into typed ones: what is taken, what is refused, and that nothing is refused alone."""

from __future__ import annotations

from typing import Any

import pytest

from megastack.config.choices import Norm
from megastack.config.convert import (
    INVALID,
    Conversion,
    InvalidValueError,
    defaults,
    replace_values,
    to_plain,
    value_of,
)
from megastack.config.schema import OptimGroupOptions, ParallelOptions, TrainConfig
from tests.config.config_cases import a_config


@pytest.mark.parametrize(
    ("kind", "given", "taken"),
    [
        (int, 2, 2),
        (int, "2", 2),
        (int, " -3 ", -3),
        (int | None, None, None),
        (float, 1, 1.0),
        (float, "1e-2", 0.01),
        (bool, True, True),
        (bool, "false", False),
        (str, "2", "2"),
        (str, 7, "7"),
        (Norm, "layer", Norm.layer),
        (Norm, Norm.layer, Norm.layer),
        (list[int], ["1", 2], [1, 2]),
        (list[float], (0.9, 1), [0.9, 1.0]),
        (Any, {"_target_": "a.B"}, {"_target_": "a.B"}),
        (list[OptimGroupOptions], [{"pattern": "x"}], [OptimGroupOptions(pattern="x")]),
    ],
)
def test_values_that_are_taken(kind: Any, given: Any, taken: Any) -> None:
    conversion = Conversion()
    found = conversion.value(kind, given, "key")
    assert (found, type(found)) == (taken, type(taken))
    assert conversion.errors == []


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (int, 2.0, "key=2.0: must be a whole number; use 2"),
        (int, 2.5, "key=2.5: must be a whole number"),
        (int, True, "key=true: must be a whole number"),
        (int, "two", "key=two: must be a whole number"),
        (int, "2_0", "key=2_0: must be a whole number"),
        (int, None, "key=null: must be a whole number"),
        (int | None, "two", "key=two: must be a whole number or null"),
        (float, "fast", "key=fast: must be a finite number"),
        (float, False, "key=false: must be a finite number"),
        (float, "nan", "key=nan: must be a finite number"),
        (float, "1_0", "key=1_0: must be a finite number"),
        (bool, 1, "key=1: must be true or false"),
        (bool, "yes", "key=yes: must be true or false"),
        (str, True, "key=true: must be text; use quotes around it"),
        (str, 1.1, "key=1.1: must be text; use quotes around it"),
        (Norm, "rmsnorm", "key=rmsnorm: not one of the choices; use rms or layer"),
        (Norm | None, 3, "key=3: not one of the choices; use rms, layer or null"),
        (list[int], 3, "key=3: must be a list; use [3]"),
        (list[int], [1, "x"], "key[1]=x: must be a whole number"),
        (list[int], {"a": 1}, "key={a: 1}: must be a list"),
        (OptimGroupOptions, 3, "key=3: must be a section of keys; use key.pattern, key.lr_scale or key.weight_decay"),
        (int, "???", "key=???: has to be given and is not; use key=…"),
        (Any, "???", "key=???: has to be given and is not; use key=…"),
    ],
)
def test_values_that_are_refused(kind: Any, given: Any, message: str) -> None:
    conversion = Conversion()
    assert conversion.value(kind, given, "key") is INVALID
    assert [str(error) for error in conversion.errors] == [message]


def test_all_faults_come_together() -> None:
    values = defaults()
    values["parallel"] |= {"tp": "two", "tpp": 2}
    values["optim"]["groups"] = [{"pattern": "x", "lr_scal": 2}, {}]
    conversion = Conversion()
    conversion.section(TrainConfig, values)
    found = [str(error) for error in conversion.errors]
    assert "parallel.tpp=2: no such key; use parallel.tp" in found
    assert "parallel.tp=two: must be a whole number" in found
    assert "optim.groups[0].lr_scal=2: no such key; use optim.groups[0].lr_scale" in found
    assert "optim.groups[1].pattern=???: has to be given and is not; use optim.groups[1].pattern=…" in found
    assert "run.steps=???: has to be given and is not; use run.steps=…" in found


def test_plain_values_make_an_equal_config() -> None:
    config = replace_values(
        a_config(), {"optim.groups": [OptimGroupOptions(pattern="mlp")], "model.mlp": {"_target_": "a.B"}}
    )
    conversion = Conversion()
    assert conversion.section(TrainConfig, to_plain(config)) == config
    assert conversion.errors == []


def test_values_by_dotted_key() -> None:
    config = replace_values(a_config(), {"parallel.zero.stage": 1, "seed": 5})
    assert (value_of(config, "parallel.zero.stage"), config.seed) == (1, 5)
    assert value_of(config, "parallel") == ParallelOptions(zero=config.parallel.zero)
    for unknown in ("parallel.tpp", "seed.x", "nothing"):
        with pytest.raises(KeyError):
            value_of(config, unknown)
        with pytest.raises(KeyError):
            replace_values(config, {unknown: 1})


@pytest.mark.parametrize(
    "use", [bool, len, str, hash, lambda x: x + 1, lambda x: 8 % x, lambda x: x < 1, lambda x: x == 1, list]
)
def test_an_unusable_value_cannot_be_used(use: Any) -> None:
    with pytest.raises(InvalidValueError):
        use(INVALID)
