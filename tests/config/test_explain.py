"""Documentation of one key, and the reference page."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastack.config.explain import explain, reference
from megastack.config.fields import keys
from megastack.config.hydra_session import packaged_configs
from megastack.config.schema import TrainConfig
from megastack.errors import ConfigError


def test_a_value() -> None:
    assert str(explain("parallel.tp", ["parallel.tp=2"])).splitlines() == [
        "parallel.tp=2",
        "  Tensor-parallel degree.",
        "  type     int, at least 1 and at most 1048576",
        "  default  1",
        "  from     the command line",
    ]


def test_a_list_of_sections_is_printed_as_it_is_written() -> None:
    phases = "data.phases=[{from_step: 2, sequence_length: 32}]"
    assert str(explain("data.phases", [phases])).splitlines()[0] == phases


def test_the_file_that_sets_a_value() -> None:
    assert explain("optim.lr", ["experiment=laptop"]).location == str(packaged_configs() / "experiment" / "laptop.yaml")
    assert explain("seed").location == "the default"


def test_a_feature_that_is_not_available_yet() -> None:
    assert "  for now  only 1; the rest is not available yet" in str(explain("parallel.cp")).splitlines()


def test_a_section_lists_its_files_and_keys() -> None:
    lines = str(explain("schedule")).splitlines()
    assert lines[:2] == ["schedule", "  The pipeline schedule."]
    files = ["1f1b", "custom", "gpipe", "interleaved", "zb_h1", "zb_h2"]
    assert lines[2] == f"  files    {', '.join(f'schedule={name}' for name in files)}"
    assert "  schedule.chunks=1" in lines


def test_an_unknown_key_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"KEY=tensor_model_parallel_size: no such key; use parallel.tp"):
        explain("tensor_model_parallel_size")


PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run scripts/make_config_reference.py"


def test_every_key_has_a_row() -> None:
    text = reference()
    assert [key.name for key in keys(TrainConfig) if not key.is_section and f"| `{key.name}` |" not in text] == []


def test_a_row_has_type_range_default_and_meaning() -> None:
    assert "| `model.dropout` | float, at least 0 and below 1 | `0.0` | Drop probability of" in reference()
    assert "| `run.steps` | int, at least 1 | `???` |" in reference()
