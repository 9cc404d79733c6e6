"""Keys that take a path of a checkpoint take a run folder too, and what a crash cut short is found and finished."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megastack.checkpoint.reader import CheckpointReader
from megastack.cli.main import main
from megastack.observe import ownership
from megastack.observe.metrics import read_metrics
from tests.tiny_runs import events, losses, status, train

SAVES = ("checkpoint.every=2", "checkpoint.at_end=true")


def test_resume_and_weights_from_a_run_are_those_of_its_newest(tmp_path: Path) -> None:
    assert train(tmp_path, "run.steps=4", *SAVES) == 0
    run, newest = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000004"
    for number, path in enumerate((run, run / "checkpoints", newest)):
        folder = tmp_path / f"more{number}"
        assert train(tmp_path, "run.steps=6", f"resume={path}", f"run.dir={folder}") == 0
        assert [event["path"] for event in events(folder) if event["name"] == "resume"] == [str(newest)]
        assert losses(folder) == losses(tmp_path / "more0") and len(losses(folder)) == 2
    for number, path in enumerate((run, newest)):
        folder = tmp_path / f"weights{number}"
        assert train(tmp_path, "run.steps=1", f"checkpoint.load_weights={path}", f"run.dir={folder}") == 0
        assert losses(folder) == losses(tmp_path / "weights0") != losses(run)[:1]


@pytest.mark.parametrize("key", ["resume", "checkpoint.load_weights"])
@pytest.mark.parametrize("damage", ["empty", "flipped"])
def test_the_checkpoint_at_a_path_is_printed(
    tmp_path: Path, key: str, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "run.steps=4", *SAVES) == 0
    run = tmp_path / "run"
    file = run / "checkpoints" / "step_00000004" / "rank_00000.safetensors"
    file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:-1] + b"?")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    capfd.readouterr()
    again = f"run.dir={tmp_path}/again"
    assert train(tmp_path, f"{key}={run}", again) == 78
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{key}={run}: is not a usable checkpoint ({run}/checkpoints/step_00000004/rank_00000")
    assert f"use {run}/checkpoints/step_00000002 or null" in line.replace(",", "")
    assert train(tmp_path, f"{key}={tmp_path}/notes", again) == 78
    assert f"{key}={tmp_path}/notes: is not a usable checkpoint (it holds a.txt); use " in capfd.readouterr().err
    assert not (tmp_path / "again").exists()


def test_a_start_finishes_a_replacement_that_was_cut_short(tmp_path: Path) -> None:
    """The only checkpoint has a hidden name; a reader finds it, a rejected start leaves it, the next one renames it."""
    assert train(tmp_path, "run.steps=2", *SAVES) == 0
    run = tmp_path / "run"
    whole, hidden = (run / "checkpoints" / name for name in ("step_00000002", ".step_00000002.replaced"))
    whole.rename(hidden)
    assert train(tmp_path, "run.steps=4", "resume=auto", "optim.freeze=[nothing]") == 78
    assert hidden.is_dir() and not whole.exists()
    assert main(["generate", str(run), "--prompt", "1", "--max-new-tokens", "1"]) == 0
    assert train(tmp_path, "run.steps=4", "resume=auto", *SAVES) == 0
    assert [event["path"] for event in events(run) if event["name"] == "resume"] == [str(whole)]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_00000002", "step_00000004"]
    assert CheckpointReader(whole).trainer["step"] == 2


def test_retention_and_resume_agree_about_a_damaged_checkpoint(tmp_path: Path) -> None:
    """A run that falls back to step 2 keeps what it fell back to until it has others."""
    assert train(tmp_path, "run.steps=4", *SAVES) == 0
    run = tmp_path / "run"
    file = run / "checkpoints" / "step_00000004" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert train(tmp_path, "run.steps=3", "resume=auto", "checkpoint.keep_last=2", *SAVES) == 0
    left = sorted(path.name for path in (run / "checkpoints").glob("step*"))
    assert left == ["step_00000002", "step_00000003", "step_00000004"]


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", '{"status": 3}', '{"status": "running", "step": "4"}'])
def test_records_of_a_run_that_cannot_be_read_do_not_stop_the_next_start(tmp_path: Path, text: str) -> None:
    assert train(tmp_path, "run.steps=2", *SAVES) == 0
    run = tmp_path / "run"
    (run / "status.json").write_text(text)
    (run / "checkpoints" / "latest").write_text(text)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(text.replace("\n", "") + '\n{"kind": "train", "step": [1]}\n')
    (run / "failures").mkdir()
    (run / "failures" / "rank_00000.json").write_text(text)
    (run / "owner" / "claim_00000001.json").write_text(json.dumps({"released": 1, "token": []}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "LIMIT_S", 0.2)
        assert train(tmp_path, "run.steps=3", "resume=auto") == 0
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3]
    assert status(run)["status"] == "completed"
