"""A configuration that was changed in Python goes through the rules of one that was read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megastack
from megastack.config.choices import Device
from megastack.config.convert import coerce, replace_values
from megastack.config.fields import keys
from megastack.config.rules import violations
from megastack.config.schema import RunOptions, TrainConfig
from megastack.errors import ConfigError
from megastack.mesh.mesh import Mesh
from megastack.models.decoder import Decoder
from megastack.testing.verify import Verifier
from tests.config.config_cases import a_config
from tests.tiny_runs import overrides

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
    ("model.norm", "batch", "model.norm=batch: not one of the choices; use rms or layer"),
    ("run.dir", 3.5, "run.dir=3.5: must be text or null"),
    ("data.paths", "a.txt", "data.paths=a.txt: must be a list; use [a.txt]"),
    ("run", None, "run=null: must be a section of keys"),
    ("optim.groups", [{"pattern": "x", "lr_scal": 1}], "optim.groups[0].lr_scal=1: no such key"),
]


@pytest.mark.parametrize(("key", "value", "line"), WRONG, ids=[f"{key}={value!r}"[:40] for key, value, _ in WRONG])
def test_a_value_of_another_type_is_refused_by_its_key(key: str, value: Any, line: str) -> None:
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
def test_what_means_the_same_becomes_what_the_schema_holds(key: str, value: Any, becomes: Any) -> None:
    config, errors = coerce(replace_values(a_config(), {key: value}))
    assert errors == [] and config == replace_values(a_config(), {key: becomes})
    head, _, last = key.rpartition(".")
    found = getattr(getattr(config, head) if head else config, last)
    assert type(found) is type(becomes)


@pytest.mark.parametrize("value", [object(), b"x", {"a": 1}, {1: 2}, {1}, 1j, float("nan"), [[]], lambda: 0])
def test_no_value_of_any_key_is_an_error_of_another_kind(value: Any) -> None:
    for key in keys(TrainConfig):
        if key.type is not Any:
            violations(replace_values(a_config(), {key.name: value}))


def test_a_legal_configuration_stays_as_it_is() -> None:
    assert coerce(a_config()) == (a_config(), [])


@pytest.mark.parametrize("thing", [None, {"run": {"steps": 3}}, "train", RunOptions(steps=3)])
def test_what_is_not_a_configuration_is_refused(thing: Any) -> None:
    for take in (megastack.train, megastack.violations, Verifier, lambda x: Decoder(x, Mesh.single())):
        with pytest.raises(ConfigError, match=r"^config=\w+: must be a TrainConfig; use megastack\.compose"):
            take(thing)


def test_train_refuses_a_changed_configuration_in_one_report_and_makes_nothing(tmp_path: Path) -> None:
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


def test_a_decoder_and_a_verification_refuse_what_they_read() -> None:
    for key, value in (("model.hidden", "16"), ("model.norm_eps", -1.0), ("batch.sequence_length", 8.0)):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            Decoder(replace_values(a_config(), {key: value}), Mesh.single())
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            Verifier(replace_values(a_config(), {key: value}))
    Decoder(replace_values(a_config(), {"run.steps": "2"}), Mesh.single())  # not read
