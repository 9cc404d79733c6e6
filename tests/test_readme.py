"""What the README tells a newcomer to type works: its commands parse and its Python runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megastack.cli.main import main
from megastack.config.compose import compose
from megastack.config.rules import violations

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SMALL = [
    *("run.steps=1", "lr.warmup_steps=0", "run.validate_every=0", "run.validate_samples=4"),
    *("batch.sequence_length=16", "checkpoint.at_end=false"),
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(verb: str) -> list[list[str]]:
    lines = [line.partition("  #")[0].partition(" > ")[0] for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith(f"megastack {verb}")]


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", "\n".join(blocks("bash")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("arguments", commands("show"), ids=" ".join)
def test_show_commands_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("arguments", [a[1:] for a in commands("train") if "-m" not in a], ids=" ".join)
def test_train_commands_are_legal(arguments: list[str]) -> None:
    assert not violations(compose(arguments))


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(a, marks=[] if "precision=bf16" in a else [pytest.mark.full]) for a in commands("train")],
    ids=" ".join,
)
def test_train_commands_run(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megastack.cli", *arguments, *SMALL, f"run.root={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed after step 1" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(a, marks=[pytest.mark.full] if "--all" in a else []) for a in commands("verify")],
    ids=" ".join,
)
def test_verify_commands_find_everything_equal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--steps", "1", "batch.sequence_length=16"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(f"import torch\ntorch.set_num_threads(1)\n{code}")
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_local_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
