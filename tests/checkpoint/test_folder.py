"""Which checkpoint counts: listing, falling back, resuming, removing."""

import os
from pathlib import Path

import pytest
import torch

from megastack.checkpoint.folder import (
    Resume,
    checkpoint_fault,
    keep_last,
    list_checkpoints,
    newest_complete,
    read_latest,
    resolve_resume,
)
from megastack.checkpoint.items import State, StateItem
from megastack.checkpoint.save import save
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh


def write(run: Path, *steps: int) -> Path:
    """Checkpoints of some steps in a run folder."""
    for step in steps:
        state = State([StateItem.replicated("model/w", torch.full((5, 7), float(step)))], {"step": step})
        save(run / "checkpoints" / f"step_{step:08d}", state, Mesh.single())
    return run / "checkpoints"


def damage(folder: Path, step: int, how: str = "flip") -> Path:
    file = folder / f"step_{step:08d}" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data if how == "flip" else data[:-1])
    return file


def at(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def test_checkpoints_are_listed_by_step_with_what_is_wrong(tmp_path: Path) -> None:
    folder = write(tmp_path, 20, 3, 100)
    damage(folder, 20, "truncate")
    (folder / "step_00000050").mkdir()
    (folder / "notes").mkdir()
    (folder / ".step_00000070.writing").mkdir()
    entries = list_checkpoints(folder)
    assert [(entry.step, entry.complete) for entry in entries] == [(3, True), (20, False), (50, False), (100, True)]
    assert "rank_00000.safetensors" in (entries[1].fault or "") and "truncated" in (entries[1].fault or "")
    assert "manifest.json: missing" in (entries[2].fault or "")
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_flipped_bit_is_found_when_content_is_checked(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4)
    file = damage(folder, 4)
    assert checkpoint_fault(at(folder, 4), content=False) is None
    assert f"{file}: crc32" in (checkpoint_fault(at(folder, 4)) or "")
    assert newest_complete(folder) == at(folder, 2)
    assert newest_complete(tmp_path / "nowhere") is None


def test_latest_is_none_where_it_leads_nowhere(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    assert read_latest(folder) == at(folder, 2)
    for content in ("step_00000009", "../../etc", ""):
        (folder / "latest").write_text(content)
        assert read_latest(folder) is None
    assert read_latest(tmp_path) is None


def test_no_resume_is_fresh_and_refuses_a_folder_with_checkpoints(tmp_path: Path) -> None:
    assert resolve_resume(None, None, tmp_path) == Resume()
    assert resolve_resume(None, tmp_path / "new", tmp_path) == Resume()
    write(tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"resume=null: run.dir=.*step_00000002.*resume=auto"):
        resolve_resume(None, tmp_path / "run", tmp_path)


def test_auto_takes_the_newest_of_its_run_else_starts_fresh(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert resolve_resume("auto", run, tmp_path) == Resume(None, run)
    folder = write(run, 2, 10, 4)
    assert resolve_resume("auto", str(run), tmp_path) == Resume(at(folder, 10), run)
    with pytest.raises(CheckpointError, match="resume=auto: needs a run folder"):
        resolve_resume("auto", None, tmp_path)


def test_a_damaged_newest_is_passed_over_or_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = write(run, 2, 4)
    file = damage(folder, 4)
    for resume in ("auto", "last"):
        found = resolve_resume(resume, run, tmp_path)
        assert (found.checkpoint, found.run_dir) == (at(folder, 2), run)
        assert [str(file) in fault for fault in found.skipped] == [True]
        with pytest.raises(CheckpointError, match=r"on_corrupt=refuse: .*rank_00000.safetensors: crc32"):
            resolve_resume(resume, run, tmp_path, on_corrupt="refuse")


def test_last_takes_the_newest_run_under_the_root(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="resume=last: there is no checkpoint under"):
        resolve_resume("last", None, tmp_path)
    with pytest.raises(CheckpointError, match="resume=last"):
        resolve_resume("last", None, tmp_path / "nowhere")
    first, second = write(tmp_path / "day" / "one", 100), write(tmp_path / "day" / "two", 2, 4)
    for path, when in ((at(first, 100), 1000), (at(second, 2), 2000), (at(second, 4), 3000)):
        os.utime(path / "manifest.json", (when, when))
    assert resolve_resume("last", None, tmp_path) == Resume(at(second, 4), second.parent)
    os.utime(at(first, 100) / "manifest.json", (4000, 4000))
    assert resolve_resume("last", None, tmp_path) == Resume(at(first, 100), first.parent)
    damage(first, 100)
    with pytest.raises(CheckpointError, match=r"resume=last: no checkpoint of the newest run .*one"):
        resolve_resume("last", None, tmp_path)


def test_a_path_is_that_checkpoint_or_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2, 4)
    assert resolve_resume(str(at(folder, 2)), None, tmp_path) == Resume(at(folder, 2))
    file = damage(folder, 4)
    with pytest.raises(CheckpointError, match=f"{file}: crc32"):
        resolve_resume(str(at(folder, 4)), None, tmp_path)
    for inside in (folder, tmp_path / "run"):
        with pytest.raises(CheckpointError, match=rf"is no usable checkpoint \(.*\); use {at(folder, 4)}$"):
            resolve_resume(str(inside), None, tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere/manifest\.json: missing"):
        resolve_resume(str(tmp_path / "nowhere"), None, tmp_path)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4, 6, 8, 10)
    assert keep_last(folder, 2) == [at(folder, step) for step in (2, 4, 6)]
    assert sorted(os.listdir(folder)) == ["latest", "step_00000008", "step_00000010"]
    assert newest_complete(folder) == at(folder, 10)
    with pytest.raises(CheckpointError, match="keep_last=0"):
        keep_last(folder, 0)


def test_multiples_and_the_one_that_latest_names_stay(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 3, 4, 5, 6)
    (folder / "latest").write_text("step_00000003\n")
    keep_last(folder, 1, every=4)
    assert [entry.step for entry in list_checkpoints(folder)] == [3, 4, 6]


def test_nothing_foreign_is_ever_removed(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4, 6)
    (at(folder, 2) / "notes.txt").write_text("mine")
    (folder / "step_00000001").mkdir()
    (folder / "step_00000001" / "notes.txt").write_text("mine")
    outside = write(tmp_path / "elsewhere", 3)
    (folder / "step_00000003").symlink_to(at(outside, 3))
    (folder / ".step_00000009.writing").mkdir()
    (folder / ".mine.removed").mkdir()
    (folder / ".empty.removed").mkdir()
    (folder / ".mine.removed" / "notes.txt").write_text("mine")
    assert keep_last(folder, 1) == [at(folder, 4)]
    assert not (folder / ".step_00000009.writing").exists()
    kept = [
        "step_00000001/notes.txt",
        "step_00000002/notes.txt",
        "step_00000002/manifest.json",
        ".mine.removed/notes.txt",
        ".empty.removed",
    ]
    assert all((folder / name).exists() for name in kept)
    assert (folder / "step_00000003").is_symlink()
    assert checkpoint_fault(at(outside, 3)) is None


def test_damaged_checkpoints_do_not_count_among_the_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4, 6)
    damage(folder, 6, "truncate")
    assert keep_last(folder, 1) == [at(folder, 2)]
    assert [entry.step for entry in list_checkpoints(folder)] == [4, 6]
