"""The page of public names: it lists all of them, few enough to read, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import megastack

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
MOST_NAMES = 40


def code() -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))


def test_there_are_few_public_names_and_each_has_an_example() -> None:
    assert len(megastack.__all__) <= MOST_NAMES
    used = set(re.findall(r"\w+", code()))
    assert not set(megastack.__all__) - used


def test_examples_import_public_names_only() -> None:
    imported = re.findall(r"^from megastack import (?:\(([^)]*)\)|(.*))$", code(), re.MULTILINE)
    names = {name for group in imported for name in re.findall(r"\w+", "".join(group))}
    assert names <= set(megastack.__all__)


def test_the_examples_run(tmp_path: Path) -> None:
    file = tmp_path / "examples.py"
    file.write_text(f"import torch\ntorch.set_num_threads(1)\n{code()}")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
