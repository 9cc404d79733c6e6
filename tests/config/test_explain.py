"""What one key means and where its value came from."""

from __future__ import annotations

import pytest

from megastack.config.explain import explain
from megastack.config.hydra_session import packaged_configs
from megastack.errors import ConfigError


def test_a_value() -> None:
    assert str(explain("parallel.tp", ["parallel.tp=2"])).splitlines() == [
        "parallel.tp=2",
        "  Tensor-parallel degree.",
        "  type     int, at least 1 and at most 1048576",
        "  default  1",
        "  from     the command line",
    ]


def test_the_file_that_gave_a_value() -> None:
    assert explain("optim.lr", ["experiment=laptop"]).location == str(packaged_configs() / "experiment" / "laptop.yaml")
    assert explain("seed").location == "the default"


def test_a_feature_to_come_says_so() -> None:
    assert "  for now  only false; the rest is not available yet" in str(explain("compile")).splitlines()


def test_a_section_lists_its_files_and_keys() -> None:
    lines = str(explain("schedule")).splitlines()
    assert lines[:2] == ["schedule", "  The pipeline schedule."]
    files = ["1f1b", "custom", "gpipe", "interleaved", "zb_h1", "zb_h2"]
    assert lines[2] == f"  files    {', '.join(f'schedule={name}' for name in files)}"
    assert "  schedule.chunks=1" in lines


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"KEY=tensor_model_parallel_size: no such key; use parallel.tp"):
        explain("tensor_model_parallel_size")
