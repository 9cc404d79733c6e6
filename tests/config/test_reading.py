"""A configuration as YAML and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.config.compose import compose
from megastack.config.convert import replace_values
from megastack.config.reading import from_yaml, to_yaml
from megastack.config.schema import OptimGroupOptions
from megastack.errors import ConfigError
from tests.config.config_cases import a_config


def test_every_key_is_written_and_read() -> None:
    config = compose(
        [
            "experiment=laptop",
            "model.mlp={_target_: my.file.MLP, width: 3, deep: {x: [1, null]}}",
            "optim.groups=[{pattern: '^blocks', lr_scale: 0.5}]",
            "parallel.layers_per_stage=[1,3]",
            "observe.tensorboard=false",
        ]
    )
    text = to_yaml(config)
    assert "keep_fp32" in text
    assert from_yaml(text) == config


def test_a_recorded_configuration_can_be_composed(tmp_path: Path) -> None:
    config = replace_values(compose(["experiment=parity"]), {"run.name": "a ${run.steps} b", "run.root": r"c:\${x}"})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose(config_dir=tmp_path, config_name="config") == config


@settings(max_examples=20, deadline=None)
@given(
    text=st.text(st.sampled_from("ab1e.-_:#\\${} '\"\n?!&*[],%@|>"), max_size=12).filter(lambda text: text != "???"),
    number=st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False),
)
def test_any_text_and_number_survives_the_round_trip(text: str, number: float) -> None:
    values = {
        "run.name": text,
        "optim.freeze": [text],
        "optim.lr": number,
        "optim.groups": [OptimGroupOptions(pattern=text)],
    }
    config = replace_values(a_config(), values)
    assert from_yaml(to_yaml(config)) == config


def test_missing_keys_have_their_defaults() -> None:
    text = "run: {steps: 3}\nbatch: {global_size: 4, sequence_length: 8}\n"
    text += "model: {layers: 2, heads: 4, hidden: 16, ffn: 32, vocab: 256}\n"
    assert from_yaml(text) == a_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not a YAML text"),
        ("[1, 2]", "a mapping of keys is expected"),
        ("sed: 1", "sed=1: no such key; use seed"),
    ],
)
def test_other_texts_are_errors(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(text)
