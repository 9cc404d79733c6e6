"""The scripts for the first checks on GPUs run on a CPU in a reduced form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run(script: str, out: Path, *arguments: str, limit_s: float = 100) -> tuple[int, dict[str, Any]]:
    command = [str(SCRIPTS / script), "--device", "cpu", "--reduced", "--out", str(out), *arguments]
    environment = os.environ | {"PYTHON": sys.executable}
    code = subprocess.run(command, timeout=limit_s, stdout=subprocess.DEVNULL, env=environment).returncode
    return code, json.loads(out.read_text()) if out.exists() else {}


@pytest.mark.full
def test_a_step_reports_its_figures_and_the_others_are_skipped(tmp_path: Path) -> None:
    code, results = run("gpu_first.sh", tmp_path / "out.json", "--only", "environment")
    assert code == 0 and results["environment"]["state"] == "ok"
    assert any(line.startswith("torch ") for line in results["environment"]["figures"]["description"])
    assert {result["state"] for name, result in results.items() if name != "environment"} == {"skipped"}


def test_an_unknown_step_is_an_error(tmp_path: Path) -> None:
    code, results = run("gpu_two.sh", tmp_path / "out.json", "--only", "warp")
    assert code == 2 and not results


@pytest.mark.full
@pytest.mark.parametrize("script", ["gpu_first.sh", "gpu_two.sh"])
def test_every_step_runs(script: str, tmp_path: Path) -> None:
    code, results = run(script, tmp_path / "out.json", limit_s=2400)
    assert code == 0 and {result["state"] for result in results.values()} == {"ok"}, results
