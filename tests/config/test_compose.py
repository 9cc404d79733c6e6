"""YAML files and overrides compose to a typed configuration or to one report of errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from megastack.config.compose import compose, located_errors, trace
from megastack.config.hydra_session import COMMAND_LINE, packaged_configs
from megastack.config.rules import violations
from megastack.errors import ConfigError


def report(*overrides: str, config_dir: Path | None = None, config_name: str = "train") -> list[str]:
    """The lines of the error report of a composition."""
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dir=config_dir, config_name=config_name)
    assert len(caught.value.violations) == len(str(caught.value).splitlines())
    return str(caught.value).splitlines()


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_files_and_overrides_become_typed_values() -> None:
    config = compose(["model=gpt2_tiny", "parallel.tp='2'", "optim.lr=1e-2", "optim.groups=[{pattern: mlp}]"])
    assert (config.model.norm, config.parallel.tp, config.optim.lr) == ("layer", 2, 0.01)
    assert config.optim.groups[0].lr_scale == 1.0


@pytest.mark.parametrize("value", ["2.0", "true", "two", "null", "[2]"])
def test_other_values_than_whole_numbers_are_errors(value: str) -> None:
    [line] = report(f"parallel.tp={value}")
    assert line.startswith("parallel.tp=")
    assert "must be a whole number" in line


def test_one_report_contains_every_error() -> None:
    lines = report(
        "parallel.tpp=2",
        "parallel.tp=3",
        "parallel.pp=2.0",
        "model=llama3_9b",
        "schedule=custom",
        "lr.warmup_steps=1000",
    )
    for start in (
        "parallel.tpp=2: no such key; use parallel.tp",
        "parallel.tp=3: must divide model.heads=4; use 1, 2 or 4",
        "parallel.pp=2.0: must be a whole number; use 2",
        "model=llama3_9b: no such file in this config group; use gpt2_124m",
        "schedule.path=???: has to be given and is not",
        "lr.warmup_steps=1000: must not be longer than run.steps=100",
    ):
        assert any(line.startswith(start) for line in lines), (start, lines)


def test_keys_of_other_systems_suggest_the_corresponding_keys() -> None:
    lines = report(
        "tensor_model_parallel_size=4",
        "pipeline_model_parallel_size=8",
        "model.num_layers=80",
        "micro_batch_size=1",
        "zero_optimization.stage=1",
        "train_micro_batch_size_per_gpu=2",
        "gradient_clipping=1.0",
        "model.family=llama3",
    )
    assert lines == [
        "tensor_model_parallel_size=4: no such key; use parallel.tp",
        "pipeline_model_parallel_size=8: no such key; use parallel.pp",
        "model.num_layers=80: no such key; use model.layers",
        "micro_batch_size=1: no such key; use batch.micro_size",
        "zero_optimization.stage=1: no such key; use parallel.zero.stage",
        "train_micro_batch_size_per_gpu=2: no such key; use batch.micro_size",
        "gradient_clipping=1.0: no such key; use optim.clip_norm",
        "model.family=llama3: not one of the choices; use llama or gpt2",
    ]


def test_compose_does_not_check_rules() -> None:
    assert compose(["parallel.tp=3"]).parallel.tp == 3


def test_interpolated_values_have_the_type_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEGREE", "2")
    assert compose(["parallel.tp=${oc.env:DEGREE}", "parallel.pp=${parallel.tp}"]).parallel.pp == 2
    monkeypatch.setenv("DEGREE", "two")
    assert report("parallel.tp=${oc.env:DEGREE}") == ["parallel.tp=two: must be a whole number (from ${oc.env:DEGREE})"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tp=${oc.env:NOT_SET_ANYWHERE}"],
        ["parallel.tp=${parallel.nothing}"],
        ["parallel.tp=${parallel.pp}", "parallel.pp=${parallel.tp}"],
        ["parallel.tp=${run.steps}", "run.steps=???"],
    ],
)
def test_an_interpolation_without_a_value_is_an_error(overrides: list[str]) -> None:
    [line] = [line for line in report(*overrides) if line.startswith("parallel.tp=")]
    assert "this interpolation has no value" in line


def test_an_interpolated_value_of_the_wrong_type_is_an_error() -> None:
    assert report("parallel.tp=${optim.lr}") == ["parallel.tp=0.0003: must be a whole number (from ${optim.lr})"]


def test_interpolations_can_use_schema_defaults() -> None:
    assert compose(["run.log_every=${parallel.zero.stage}${parallel.cp}"]).run.log_every == 1


def test_a_missing_value_is_named() -> None:
    assert report("run.steps=???") == ["run.steps=???: has to be given and is not; use run.steps=…"]


def test_user_files_take_precedence_over_packaged_ones(tmp_path: Path) -> None:
    write(tmp_path, "model/mine.yaml", "layers: 2\nheads: 2\nhidden: 8\nffn: 16\nvocab: 256\n")
    write(tmp_path, "parallel/tp2.yaml", "tp: 2\npp: 2\n")
    config = compose(["model=mine", "parallel=tp2"], config_dir=tmp_path)
    assert (config.model.hidden, config.parallel.pp, config.batch.sequence_length) == (8, 2, 128)


def test_a_primary_file_of_the_user(tmp_path: Path) -> None:
    write(tmp_path, "mine.yaml", "defaults:\n  - train\n  - override model: gpt2_tiny\n  - _self_\nrun: {steps: 7}\n")
    config = compose(config_dir=tmp_path, config_name="mine")
    assert (config.run.steps, config.model.family) == (7, "gpt2")
    assert compose(config_dir=str(tmp_path), config_name="mine.yaml") == config


def test_errors_for_unknown_keys_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model/mine.yaml", "num_layers: 2\nhidden: 8\nhead: 2\n")
    lines = report("model=mine", config_dir=tmp_path)
    assert f"model.num_layers=2: no such key (in {path}); use model.layers" in lines
    assert f"model.head=2: no such key (in {path}); use model.heads" in lines
    assert "model.layers=???: has to be given and is not; use model.layers=…" in lines


def test_errors_for_wrong_types_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "parallel/mine.yaml", "tp: 2.5\nlayers_per_stage: 3\nzero: 1\n")
    lines = report("parallel=mine", config_dir=tmp_path)
    assert f"parallel.tp=2.5: must be a whole number (in {path})" in lines
    assert f"parallel.layers_per_stage=3: must be a list (in {path}); use [3]" in lines
    assert any(line.startswith("parallel.zero=1: must be a section of keys") for line in lines)


def test_hydra_settings_in_user_files_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path, "experiment/mine.yaml", "# @package _global_\nhydra: {run: {dir: here}}\n")
    assert report("experiment=mine", config_dir=tmp_path) == [
        f"hydra.run.dir=here: settings of Hydra are not used (in {path}); use run.root or run.dir"
    ]


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ("override /hydra/launcher: joblib", "hydra/launcher=joblib"),
        ("/hydra/env: default", "hydra/env=default"),
        ("optional /hydra/job_logging: mine", "hydra/job_logging=mine"),
        ("/hydra/job_logging/disabled", "hydra/job_logging=disabled"),
    ],
)
def test_hydra_config_groups_in_user_files_are_errors(tmp_path: Path, entry: str, key: str) -> None:
    path = write(
        tmp_path, "experiment/mine.yaml", f"# @package _global_\ndefaults:\n  - {entry}\n  - _self_\nseed: 3\n"
    )
    assert report("experiment=mine", config_dir=tmp_path) == [
        f"{key}: settings of Hydra are not used (in {path}); use run.root or run.dir"
    ]


def test_a_user_schedule_is_a_group_file(tmp_path: Path) -> None:
    write(tmp_path, "schedule/my_file.yaml", "name: custom\npath: mine.csv\n")
    assert compose(["schedule=my_file"], config_dir=tmp_path).schedule.path == "mine.csv"


@pytest.mark.parametrize(
    ("files", "overrides", "name", "line"),
    [
        ({}, [], "nope", "--config-name=nope: no such file; use train"),
        (
            {"model/mine.yaml": "a: [1\n"},
            ["model=mine"],
            "train",
            "--config-name=train: it includes a file that is not YAML",
        ),
        (
            {"mine.yaml": "defaults: [model: nope]\n"},
            [],
            "mine",
            "--config-name=mine: In 'mine': Could not find 'model/nope'",
        ),
    ],
)
def test_files_that_cannot_be_merged_are_errors(
    tmp_path: Path, files: dict[str, str], overrides: list[str], name: str, line: str
) -> None:
    for file, text in files.items():
        write(tmp_path, file, text)
    assert report(*overrides, config_dir=tmp_path, config_name=name)[0].startswith(line)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    [line] = report(config_dir=tmp_path / "nope")
    assert line.startswith(f"--config-dir={tmp_path / 'nope'}: no such folder")


def test_trace_records_where_values_are_set() -> None:
    composition = trace(["experiment=laptop", "parallel.tp=4", "model.mlp={_target_: a.B}"])
    locations = {
        key: composition.location(key) for key in ("parallel.tp", "parallel.dp", "optim.lr", "seed", "model.mlp")
    }
    folder = packaged_configs()
    assert locations == {
        "parallel.tp": COMMAND_LINE,
        "parallel.dp": str(folder / "parallel" / "dp2_tp2_pp2.yaml"),
        "optim.lr": str(folder / "experiment" / "laptop.yaml"),
        "seed": None,
        "model.mlp": COMMAND_LINE,
    }
    assert "llama_byte" in composition.options["model"]


def test_precedence_of_primary_file_experiment_and_command_line() -> None:
    assert compose(["experiment=parity"]).run.steps == 5
    assert compose(["experiment=parity", "run.steps=9", "precision=fp32"]).precision.compute == "fp32"


def test_a_selected_batch_overrides_the_batch_of_the_model() -> None:
    assert compose(["model=llama3_405b"]).batch.global_size == 2048
    assert compose(["model=llama3_405b", "batch=small"]).batch.global_size == 16


def test_composing_leaves_no_global_state() -> None:
    compose()
    assert not GlobalHydra.instance().is_initialized()


def test_composing_imports_no_torch() -> None:
    script = (
        "import sys; from megastack.config.compose import compose; from megastack.config.rules import violations; "
        "import megastack.config.explain; "
        "assert violations(compose(['experiment=laptop'])) == []; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_files_that_are_not_mappings_or_not_text_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "experiment/mine.yaml", "- run\n- batch\n")
    [line] = report("experiment=mine", config_dir=tmp_path)
    assert line == f"--config-name=train: it includes a file that is a list, not a mapping of keys: {path}"
    path.write_bytes(b"\x80\xff\x00")
    [line] = report("experiment=mine", config_dir=tmp_path)
    assert line.endswith(f"is not UTF-8 text: {path}")


def test_an_experiment_without_a_package_line_gets_advice(tmp_path: Path) -> None:
    path = write(tmp_path, "experiment/mine.yaml", "run: {steps: 3}\n")
    advice = f"add `# @package _global_` as the first line of {path}"
    assert report("experiment=mine", config_dir=tmp_path) == [
        f"experiment={{run: {{steps: 3}}}}: no such key; {advice}"
    ]


def test_a_file_instead_of_a_folder_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "mine.yaml", "run: {steps: 3}\n")
    assert report(config_dir=path) == [f"--config-dir={path}: is a file; use a folder of YAML files"]


def test_located_errors_name_the_file_that_sets_the_value() -> None:
    given = ["experiment=laptop", "run.steps=5", "parallel.tp=3"]
    with pytest.raises(ConfigError) as caught, located_errors(given):
        raise ConfigError.of(violations(compose(given)))
    lines = str(caught.value).splitlines()
    file = packaged_configs() / "experiment" / "laptop.yaml"
    assert f"lr.warmup_steps=20: must not be longer than run.steps=5 (in {file}); use 5 or less" in lines
    assert any(line.startswith("parallel.tp=3: must divide model.heads=4; use") for line in lines)
