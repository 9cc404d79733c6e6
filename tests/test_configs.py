"""Every packaged YAML file composes, matches its name, and is valid at typical degrees."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megastack.config.compose import compose
from megastack.config.convert import value_of
from megastack.config.hydra_session import packaged_configs
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.models.profile import total_parameters
from megastack.pipeline.schedules.registry import build_schedule

CONFIGS = packaged_configs()
FILES = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
GIVEN = {
    "schedule/custom": ["schedule.path=mine.csv"],
    "data/text": ["data.paths=[a.txt]"],
    "data/jsonl": ["data.paths=[a.jsonl]"],
    "data/bin": ["data.paths=[corpus]"],
}
"""Overrides for files that leave a choice open."""


def choices(group: str) -> list[str]:
    return [path.stem for path in FILES if path.parent.name == group]


@cache
def composed(file: str) -> TrainConfig:
    """The configuration with one group file selected; ``train`` selects none."""
    group, _, option = file.rpartition("/")
    return compose([*([f"{group}={option}"] if group else []), *GIVEN.get(file, ())])


@pytest.mark.parametrize("file", FILES, ids=str)
def test_every_file_composes_and_is_valid(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = composed("train").batch
    build_schedule("gpipe", 1, 1, batch.global_size // batch.micro_size).dump(tmp_path / "mine.csv")
    monkeypatch.chdir(tmp_path)
    assert violations(composed(str(file.with_suffix("")))) == []


def test_every_file_begins_with_a_comment() -> None:
    assert [str(file) for file in FILES if not (CONFIGS / file).read_text().startswith("#")] == []


@pytest.mark.parametrize("layout", choices("parallel"))
@pytest.mark.parametrize("model", [model for model in choices("model") if model.endswith(("tiny", "byte"))])
def test_small_models_are_valid_on_every_layout(model: str, layout: str) -> None:
    config = replace(composed(f"model/{model}"), parallel=composed(f"parallel/{layout}").parallel)
    assert violations(config) == []


@pytest.mark.parametrize("layout", [layout for layout in choices("parallel") if layout != "single"])
def test_layouts_are_named_after_their_degrees(layout: str) -> None:
    degrees = {axis: value_of(composed(f"parallel/{layout}"), f"parallel.{axis}") for axis in ("dp", "tp", "pp")}
    assert layout == "_".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1)


@pytest.mark.parametrize("layout", ["pp2", "tp2_pp2"])
def test_interleaving_is_valid_for_the_small_models(layout: str) -> None:
    config = replace(composed("schedule/interleaved"), parallel=composed(f"parallel/{layout}").parallel)
    assert violations(config) == []


PRESETS = {
    "gpt2_124m": (124_439_808, "parallel.dp=8 parallel.tp=2 parallel.pp=4"),
    "llama3_8b": (8_030_261_248, "parallel.dp=16 parallel.tp=8"),
    "llama3_70b": (70_553_706_496, "parallel.dp=32 parallel.tp=8 parallel.pp=4"),
    "llama3_405b": (405_853_388_800, "parallel.dp=128 parallel.tp=8 parallel.pp=16 cluster.nodes=2048"),
    "qwen3_8b": (8_190_735_360, "parallel.dp=16 parallel.tp=8 parallel.pp=2 schedule=interleaved"),
}


@pytest.mark.parametrize("model", PRESETS)
def test_published_models_have_their_size_and_are_valid_at_typical_degrees(model: str) -> None:
    parameters, degrees = PRESETS[model]
    config = compose([f"model={model}", *degrees.split()])
    assert violations(config) == []
    assert total_parameters(config) == parameters


def test_every_large_model_is_tested() -> None:
    assert {model for model in choices("model") if not model.endswith(("tiny", "byte"))} == set(PRESETS)


def test_the_laptop_experiment_uses_eight_ranks_and_the_builtin_text() -> None:
    config = composed("experiment/laptop")
    assert (config.parallel.dp, config.parallel.tp, config.parallel.pp) == (2, 2, 2)
    assert (config.data.source, config.data.tokenizer, config.batch.global_size) == ("builtin", "byte", 32)
    assert violations(config, 8) == []


def test_without_arguments_one_rank_trains() -> None:
    config = composed("train")
    assert (config.parallel.dp, config.parallel.tp, config.parallel.pp, config.data.source) == (None, 1, 1, "builtin")
    for ranks in (1, 2, 4, 8):
        assert violations(config, ranks) == []


def test_an_installed_package_has_its_files(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    root, built = Path(__file__).resolve().parents[1], tmp_path / "built"
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(build, cwd=root, check=True, capture_output=True)
    installed = sorted(path.relative_to(built / "megastack" / "configs") for path in built.rglob("*.yaml"))
    assert installed == FILES
    script = (
        "import megastack.config.hydra_session as s, megastack.config.compose as c; "
        f"assert str(s.packaged_configs()).startswith({str(built)!r}); c.compose(['experiment=laptop'])"
    )
    environment = os.environ | {"PYTHONPATH": str(built)}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
