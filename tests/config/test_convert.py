"""Conversion of plain values and of configurations changed in Python: accepted values and collected errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megastack
from megastack.config.choices import Device, Norm
from megastack.config.convert import (
    INVALID,
    Conversion,
    InvalidValueError,
    coerce,
    defaults,
    replace_values,
    to_plain,
    value_of,
)
from megastack.config.fields import keys
from megastack.config.rules import violations
from megastack.config.schema import OptimGroupOptions, ParallelOptions, RunOptions, TrainConfig
from megastack.errors import ConfigError
from megastack.mesh.mesh import Mesh
from megastack.models.decoder import Decoder
from megastack.testing.verify import Verifier
from tests.config.config_cases import a_config
from tests.tiny_runs import overrides


@pytest.mark.parametrize(
    ("kind", "given", "converted"),
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
def test_convertible_values(kind: Any, given: Any, converted: Any) -> None:
    conversion = Conversion()
    found = conversion.value(kind, given, "key")
    assert (found, type(found)) == (converted, type(converted))
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
        (Norm, "rmsnorm", "key=rmsnorm: must be one of the choices; use rms or layer"),
        (Norm | None, 3, "key=3: must be one of the choices; use rms, layer or null"),
        (list[int], 3, "key=3: must be a list; use [3]"),
        (list[int], None, "key=null: must be a list; use []"),
        (list[int], "2,4", "key=2,4: must be a list; use [2, 4]"),
        (list[int], "2:4", "key=2:4: must be a list"),
        (list[str], "a,b", "key=a,b: must be a list; use [a,b]"),
        (list[OptimGroupOptions], "mlp", "key=mlp: must be a list"),
        (
            Device,
            "cuda:1",
            "key=cuda:1: must be a kind of device; the environment variable CUDA_VISIBLE_DEVICES selects GPUs by "
            "number; use auto, cpu or cuda",
        ),
        (list[int], [1, "x"], "key[1]=x: must be a whole number"),
        (list[int], {"a": 1}, "key={a: 1}: must be a list"),
        (OptimGroupOptions, 3, "key=3: must be a section of keys; use key.pattern, key.lr_scale or key.weight_decay"),
        (int, "???", "key=???: must be set; use key=…"),
        (Any, "???", "key=???: must be set; use key=…"),
    ],
)
def test_values_of_the_wrong_type_are_errors(kind: Any, given: Any, message: str) -> None:
    conversion = Conversion()
    assert conversion.value(kind, given, "key") is INVALID
    assert [str(error) for error in conversion.errors] == [message]


def test_all_errors_are_collected() -> None:
    values = defaults()
    values["parallel"] |= {"tp": "two", "tpp": 2}
    values["optim"]["groups"] = [{"pattern": "x", "lr_scal": 2}, {}]
    conversion = Conversion()
    conversion.section(TrainConfig, values)
    found = [str(error) for error in conversion.errors]
    assert "parallel.tpp=2: no such key; use parallel.tp" in found
    assert "parallel.tp=two: must be a whole number" in found
    assert "optim.groups[0].lr_scal=2: no such key; use optim.groups[0].lr_scale" in found
    assert "optim.groups[1].pattern=???: must be set; use optim.groups[1].pattern=…" in found
    assert "run.steps=???: must be set; use run.steps=…" in found


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
def test_every_use_of_an_invalid_value_raises(use: Any) -> None:
    with pytest.raises(InvalidValueError):
        use(INVALID)


WRONG: list[tuple[str, Any, str]] = [
    ("parallel.tp", "2", "parallel.tp=2: must be a whole number; use 2"),
    ("run.steps", "ten", "run.steps=ten: must be a whole number"),
    ("run.steps", 10.0, "run.steps=10.0: must be a whole number; use 10"),
    ("run.steps", True, "run.steps=true: must be a whole number"),
    ("run.steps", None, "run.steps=null: must be a whole number"),
    ("run.steps", [3], "run.steps=[3]: must be a whole number"),
    ("optim.lr", "3e-4", "optim.lr=3e-4: must be a finite number; use 0.0003"),
    ("optim.lr", 10**400, "must be a finite number"),
    ("optim.clip_norm", float("nan"), "optim.clip_norm=nan: must be a finite number or null; use null for no clipping"),
    ("optim.betas", 0.9, "optim.betas=0.9: must be a list; use [0.9]"),
    ("optim.betas", ["0.9", 0.95], "optim.betas[0]=0.9: must be a finite number; use 0.9"),
    ("model.bias", "false", "model.bias=false: must be true or false; use false"),
    ("model.bias", 1, "model.bias=1: must be true or false"),
    ("model.norm", "batch", "model.norm=batch: must be one of the choices; use rms or layer"),
    ("run.dir", 3.5, "run.dir=3.5: must be text or null"),
    ("data.paths", "a.txt", "data.paths=a.txt: must be a list; use [a.txt]"),
    ("run", None, "run=null: must be a section of keys"),
    ("optim.groups", [{"pattern": "x", "lr_scal": 1}], "optim.groups[0].lr_scal=1: no such key"),
]


@pytest.mark.parametrize(("key", "value", "line"), WRONG, ids=[f"{key}={value!r}"[:40] for key, value, _ in WRONG])
def test_a_value_of_the_wrong_type_is_an_error_under_its_key(key: str, value: Any, line: str) -> None:
    config = replace_values(a_config(), {key: value})
    found = [str(violation) for violation in violations(config)]
    assert any(each.startswith(line) or (line in each and each.startswith(key)) for each in found)


@pytest.mark.parametrize(
    ("key", "value", "becomes"),
    [
        ("optim.betas", (0.9, 0.95), [0.9, 0.95]),
        ("run.steps", np.int64(3), 3),
        ("optim.lr", np.float64(0.5), 0.5),
        ("optim.lr", 1, 1.0),
        ("device", "cpu", Device.cpu),
        ("run.dir", Path("a") / "b", "a/b"),
        ("data.paths", [Path("a")], ["a"]),
    ],
)
def test_equivalent_values_are_coerced(key: str, value: Any, becomes: Any) -> None:
    config, errors = coerce(replace_values(a_config(), {key: value}))
    assert errors == [] and config == replace_values(a_config(), {key: becomes})
    head, _, last = key.rpartition(".")
    found = getattr(getattr(config, head) if head else config, last)
    assert type(found) is type(becomes)


@pytest.mark.parametrize("value", [object(), b"x", {"a": 1}, {1: 2}, {1}, 1j, float("nan"), [[]], lambda: 0])
def test_no_value_of_any_key_raises_another_exception(value: Any) -> None:
    for key in keys(TrainConfig):
        if key.type is not Any:
            violations(replace_values(a_config(), {key.name: value}))


def test_a_valid_configuration_is_unchanged() -> None:
    assert coerce(a_config()) == (a_config(), [])


@pytest.mark.parametrize("thing", [None, {"run": {"steps": 3}}, "train", RunOptions(steps=3)])
def test_other_arguments_than_configurations_are_errors(thing: Any) -> None:
    for take in (megastack.train, megastack.violations, Verifier, lambda x: Decoder(x, Mesh.single())):
        with pytest.raises(ConfigError, match=r"^config=\w+: must be a TrainConfig; use megastack\.compose"):
            take(thing)


def test_train_rejects_an_invalid_configuration_in_one_report_before_creating_files(tmp_path: Path) -> None:
    config = megastack.compose(overrides(tmp_path))
    changed = replace(
        config,
        run=replace(config.run, steps="2"),
        optim=replace(config.optim, lr=-1.0),
        parallel=replace(config.parallel, tp=3),
    )
    with pytest.raises(ConfigError) as raised:
        megastack.train(changed)
    keys_named = {violation.key for violation in raised.value.violations}
    assert {"run.steps", "optim.lr"} <= keys_named and any(
        key.startswith(("model.", "parallel.")) for key in keys_named
    )
    assert not (tmp_path / "run").exists()


def test_decoder_and_verifier_validate_the_keys_they_use() -> None:
    for key, value in (("model.hidden", "16"), ("model.norm_eps", -1.0), ("batch.sequence_length", 8.0)):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            Decoder(replace_values(a_config(), {key: value}), Mesh.single())
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            Verifier(replace_values(a_config(), {key: value}))
    Decoder(replace_values(a_config(), {"run.steps": "2"}), Mesh.single())  # the decoder does not use it
