"""`megastack checkpoint`: tables of checkpoints, and exit code 1 if one is incomplete."""

import json
from pathlib import Path

import pytest

from megastack.checkpoint.save import save
from megastack.cli.main import main
from megastack.mesh.mesh import Mesh
from tests.checkpoint.state_cuts import TENSORS, state_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4):
        save(tmp_path / "checkpoints" / f"step_{step:08d}", state_of("whole", 0, 1), Mesh.single())
    return tmp_path


def damage(path: Path, kind: str) -> None:
    if kind == "missing":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data[:-3] if kind == "truncated" else data)


@pytest.mark.parametrize("where", ["", "checkpoints"])
def test_a_list_names_steps_sizes_and_the_latest(run: Path, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(run / where), "--json", str(run / "ls.json")]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["checkpoint", "written", "size", "ranks", "state"]
    assert first.startswith("step_00000002 ") and first.endswith("complete")
    assert second.startswith("step_00000004 (latest)")
    assert [entry["step"] for entry in json.loads((run / "ls.json").read_text())["checkpoints"]] == [2, 4]


def test_a_list_names_what_is_incomplete(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run / "checkpoints/step_00000002/rank_00000.safetensors", "truncated")
    (run / "checkpoints/.step_00000006.writing").mkdir()
    assert main(["checkpoint", "ls", str(run)]) == 1
    printed = capsys.readouterr().out
    assert "incomplete" in printed and "rank_00000.safetensors" in printed and "truncated" in printed
    assert ".step_00000006.writing: left over" in printed


def test_show_has_files_tensors_and_the_trainers_state(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(run), "--json", str(run / "show.json")]) == 0  # of a folder, the newest
    printed = capsys.readouterr().out
    assert "step_00000004: " in printed and "from 1 rank," in printed
    assert all(name in printed for name in TENSORS)
    assert "37×7" in printed and "scalar" in printed and "rank_00000.safetensors" in printed
    assert any(line.split() == ["step", "10"] for line in printed.splitlines())
    assert json.loads((run / "show.json").read_text())["trainer"] == {"step": 10, "cut": "whole"}


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing"])
@pytest.mark.parametrize("name", ["rank_00000.safetensors", "trainer.json", "manifest.json"])
def test_verify_names_what_is_damaged(run: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run / "checkpoints" / "step_00000004"
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": complete") == 2
    damage(newest / name, kind)
    for path in (newest, run):
        assert main(["checkpoint", "verify", str(path)]) == 1
        printed = capsys.readouterr().out
        assert str(newest / name) in printed and f"{newest}: corrupt or incomplete" in printed
    assert f"{run / 'checkpoints' / 'step_00000002'}: complete" in printed


@pytest.mark.parametrize("action", ["ls", "show", "verify"])
def test_a_missing_checkpoint_is_an_error(tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "step_00000002"):
        assert main(["checkpoint", action, str(path)]) == 1
        assert str(path) in capsys.readouterr().out
