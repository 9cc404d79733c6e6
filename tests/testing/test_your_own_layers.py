"""The page about your own layers: its files, its commands, and the output that it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megastack.cli.main import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "your_own_layers.md").read_text()
FILES = {
    name: text
    for text, name in re.findall(r"```(?:python|yaml)\n((?:# @package _global_\n)?# (\S+)\n.*?)```", PAGE, re.DOTALL)
}
COMMANDS = [
    shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
SHOWN = dict(re.findall(r"```bash\n(megastack verify[^\n]*)\n```\n\n```\n(.*?)```", PAGE, re.DOTALL))


def commands(verb: str) -> list[list[str]]:
    return [command[1:] for command in COMMANDS if command[1] == verb]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, outside the package, with the files of the page."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for module in [Path(name).stem for name in FILES if name.endswith(".py")]:
        sys.modules.pop(module, None)


def numbers_out(text: str) -> list[str]:
    """The lines without figures, which depend on the training text and on rounding."""
    lines = [re.sub(r"^(adamw|sgd) .*", r"\1", line) for line in text.splitlines()]
    return [re.sub(r" +", " ", re.sub(r"^by +\S+", "by", line)).rstrip() for line in lines]


def test_the_page_has_what_the_tests_run() -> None:
    assert set(FILES) == {"my_layers.py", "experiment/mine.yaml", "mistakes.py", "my_buffers.py"}
    assert (len(commands("train")), len(commands("verify")), len(SHOWN)) == (2, 5, 3)


@pytest.mark.parametrize(
    "command", [commands("train")[0], pytest.param(commands("train")[1], marks=pytest.mark.full)], ids=" ".join
)
def test_the_layers_train_from_yaml(command: list[str], folder: Path) -> None:
    few = ["run.steps=2", "run.validate_samples=4", "checkpoint.at_end=false"]
    done = subprocess.run(
        [sys.executable, "-m", "megastack.cli", *command, *few], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed after step 2" in done.stdout


@pytest.mark.parametrize("command", list(SHOWN), ids=lambda command: command.partition("mine")[2] or "own layers")
def test_verify_prints_what_the_page_shows(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(shlex.split(command)[1:])
    output = capsys.readouterr().out
    assert code == (1 if "mistakes" in command else 0), output
    assert numbers_out(output) == numbers_out(SHOWN[command])


def test_the_layer_with_buffers_is_equal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [command for command in commands("verify") if "my_buffers" in " ".join(command)]
    assert main(command) == 0, capsys.readouterr().out


def test_the_page_shows_the_cause_of_a_missing_declaration_and_the_module_of_a_wrong_forward() -> None:
    forgotten, local = (shown for command, shown in SHOWN.items() if "mistakes" in command)
    assert "the gradient of blocks.1.mlp.gain (ForgottenGain)" in forgotten
    assert "undeclared partial gradient over tp" in forgotten
    assert "the output of blocks.0.mlp (LocalNorm), the first module that differs" in local


@pytest.mark.full
def test_every_layout_of_the_page_is_equal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [command for command in commands("verify") if "--all" in command]
    assert main(command) == 0, capsys.readouterr().out
