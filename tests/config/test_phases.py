"""Data phases as configurations, and the old name of their key, ``data.stages``."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastack.config.choices import DataSource
from megastack.config.compose import compose, trace
from megastack.config.convert import replace_values, to_plain
from megastack.config.data_schema import BlendSource, DataPhaseOptions
from megastack.config.explain import explain
from megastack.config.overrides import sweep_jobs
from megastack.config.phases import longest, phase_at, phase_configs, source_text
from megastack.config.reading import from_yaml, to_yaml
from megastack.errors import ConfigError
from megastack.preflight.checkpoint import changes
from tests.config.config_cases import a_config

ONE = "[{from_step: 2, sequence_length: 8}]"
OTHER = "[{from_step: 3, sequence_length: 16}]"
TWICE = "must not be given together with data.phases, its present name; use data.phases only"


def phases_of(*overrides: str, config_dir: Path | None = None, config_name: str = "train") -> list[int]:
    """The steps at which the later phases of a composition begin."""
    config = compose(overrides, config_dir=config_dir, config_name=config_name)
    return [phase.from_step for phase in config.data.phases]


def group(folder: Path, name: str, text: str) -> Path:
    """Write a file of the config group ``data``."""
    path = folder / "data" / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_phase_keeps_what_it_does_not_set() -> None:
    phases = [
        DataPhaseOptions(from_step=2, sequence_length=16),
        DataPhaseOptions(from_step=4, source=DataSource.text, paths=["a.txt"]),
        DataPhaseOptions(from_step=6, blend=[BlendSource(paths=["b"], weight=1.0)]),
    ]
    config = replace_values(a_config(), {"data.phases": phases})
    found = phase_configs(config)
    assert [(phase.from_step, phase.sequence_length) for phase in found] == [(0, 8), (2, 16), (4, 16), (6, 16)]
    assert [source_text(phase.config) for phase in found] == ["builtin", "builtin", "text a.txt", "bin b 100.0%"]
    assert all(phase.config.data.phases == [] for phase in found)
    assert [phase_at(found, step).from_step for step in (0, 1, 2, 5, 9)] == [0, 0, 2, 4, 6]
    assert longest(config) == found[1].config


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_the_old_name_of_the_key_is_accepted(prefix: str) -> None:
    assert compose([f"{prefix}data.stages={ONE}"]) == compose([f"data.phases={ONE}"])


def test_the_last_override_under_one_name_applies() -> None:
    assert phases_of(f"data.stages={ONE}", f"data.stages={OTHER}") == [3]


@pytest.mark.parametrize("overrides", [[f"data.stages={ONE}", "data.phases=[]"], ["data.phases=[]", "data.stages=[]"]])
def test_overrides_under_both_names_are_an_error(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert str(caught.value).startswith("data.stages=[") and str(caught.value).endswith(f"]: {TWICE}")


@pytest.mark.parametrize("name", ["stages", "phases"])
def test_files_may_use_either_name_and_overrides_replace_it(name: str, tmp_path: Path) -> None:
    path = group(tmp_path, "mine", f"{name}: {ONE}\n")
    assert phases_of("data=mine", config_dir=tmp_path) == [2]
    assert phases_of("data=mine", f"data.phases={OTHER}", config_dir=tmp_path) == [3]
    assert phases_of("data=mine", f"data.stages={OTHER}", config_dir=tmp_path) == [3]
    assert phases_of("data=mine", "data.phases=[]", config_dir=tmp_path) == []
    assert trace(["data=mine"], config_dir=tmp_path).location("data.phases") == str(path)


def test_files_with_both_names_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = group(tmp_path, "mine", f"stages: {ONE}\nphases: {ONE}\n")
    with pytest.raises(ConfigError) as caught:
        compose(["data=mine"], config_dir=tmp_path)
    rule, advice = TWICE.split("; ")
    assert str(caught.value).endswith(f"{rule} (in {path}); {advice}")


def test_errors_under_the_old_name_are_reported_under_the_present_one(tmp_path: Path) -> None:
    path = group(tmp_path, "mine", "stages: [{from_step: x}]\n")
    with pytest.raises(ConfigError) as caught:
        compose(["data=mine"], config_dir=tmp_path)
    assert str(caught.value) == f"data.phases[0].from_step=x: must be a whole number (in {path})"


@pytest.mark.parametrize("name", ["stages", "phases"])
@pytest.mark.parametrize("reference", ["stages", "phases"])
def test_interpolations_may_use_either_name(name: str, reference: str, tmp_path: Path) -> None:
    group(tmp_path, "mine", f"{name}: {ONE}\n")
    overrides = ["data=mine", f"run.log_every=${{data.{reference}[0].from_step}}"]
    assert compose(overrides, config_dir=tmp_path).run.log_every == 2


@pytest.mark.parametrize("phases", ["[]", ONE])
def test_a_recorded_configuration_with_the_old_name_is_read(phases: str, tmp_path: Path) -> None:
    config = compose([f"data.phases={phases}"])
    text = to_yaml(config)
    assert "phases:" in text and "stages:" not in text
    old = text.replace("phases:", "stages:")
    assert from_yaml(old) == config
    (tmp_path / "config.yaml").write_text(old)
    assert compose(config_dir=tmp_path, config_name="config") == config
    assert phases_of(f"data.phases={OTHER}", config_dir=tmp_path, config_name="config") == [3]


def test_a_recorded_configuration_with_the_old_name_is_compared() -> None:
    config = compose([f"data.phases={ONE}"])
    old = to_plain(config)
    old["data"]["stages"] = old["data"].pop("phases")
    assert changes(old, config) == []
    [change] = changes(old, compose())
    assert (change.key, change.new) == ("data.phases", [])


def test_show_and_sweeps_accept_the_old_name() -> None:
    assert explain("data.stages").key.name == "data.phases"
    jobs = sweep_jobs([f"data.stages=[],{ONE}"])
    assert [phases_of(*job) for job in jobs] == [[], [2]]
