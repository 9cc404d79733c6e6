"""Which checkpoint counts: listing, falling back, resuming, removing."""

import os
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megastack.checkpoint import usable
from megastack.checkpoint.folder import (
    Resume,
    checkpoint_error,
    keep_last,
    list_checkpoints,
    newest_complete,
    read_latest,
    resolve_resume,
)
from megastack.checkpoint.items import State, StateItem
from megastack.checkpoint.manifest import FileRecord, dump_manifest, read_manifest
from megastack.checkpoint.save import save
from megastack.checkpoint.usable import Verified
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
    assert "rank_00000.safetensors" in (entries[1].error or "") and "truncated" in (entries[1].error or "")
    assert "manifest.json: missing" in (entries[2].error or "")
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_flipped_bit_is_found_when_content_is_checked(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4)
    file = damage(folder, 4)
    assert checkpoint_error(at(folder, 4), content=False) is None
    assert f"{file}: crc32" in (checkpoint_error(at(folder, 4)) or "")
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
        assert [str(file) in error for error in found.skipped] == [True]
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
        said = rf"={inside}: is not a usable checkpoint \({file}: crc32 .*\); use {at(folder, 2)}, or null"
        with pytest.raises(CheckpointError, match=said):
            resolve_resume(str(inside), None, tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere: is not a usable checkpoint \(no such folder\)"):
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
    assert checkpoint_error(at(outside, 3)) is None


def test_damaged_checkpoints_do_not_count_among_the_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4, 6)
    damage(folder, 6, "truncate")
    assert keep_last(folder, 1) == [at(folder, 2)]
    assert [entry.step for entry in list_checkpoints(folder)] == [4, 6]


def test_a_checkpoint_counts_among_the_kept_if_a_resume_would_take_it(tmp_path: Path) -> None:
    """Damage that only the content shows: what is kept is what resume=auto falls back to."""
    folder = write(tmp_path, 2, 4, 6, 8)
    damage(folder, 8)
    damage(folder, 6)
    assert keep_last(folder, 2) == []
    assert resolve_resume("auto", tmp_path, tmp_path).checkpoint == at(folder, 4)
    assert keep_last(folder, 1) == [at(folder, 2)]
    assert [entry.step for entry in list_checkpoints(folder)] == [4, 6, 8]
    damage(folder, 4)
    write(tmp_path, 2)
    assert keep_last(folder, 1) == []
    assert resolve_resume("auto", tmp_path, tmp_path).checkpoint == at(folder, 2)


def test_trainer_state_that_cannot_be_used_is_damage_too(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4)
    path = at(folder, 4)
    manifest = read_manifest(path)
    text = '{"step": -4}\n'
    (path / "trainer.json").write_text(text)
    record = FileRecord("trainer.json", len(text), zlib.crc32(text.encode()))
    (path / "manifest.json").write_text(dump_manifest(replace(manifest, files={**manifest.files, record.name: record})))
    assert resolve_resume("auto", tmp_path, tmp_path).checkpoint == at(folder, 2)
    assert keep_last(folder, 1) == []


def test_what_a_process_has_verified_is_read_again_only_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, verified, read = write(tmp_path, 2, 4, 6), Verified(), list[str]()
    whole = usable.file_error
    monkeypatch.setattr(usable, "file_error", lambda f, file, *given: read.append(f.name) or whole(f, file, *given))
    verified.trust(at(folder, 6))
    assert keep_last(folder, 3, verified=verified) == []
    assert set(read) == {"step_00000002", "step_00000004"}
    read.clear()
    assert keep_last(folder, 3, verified=verified) == [] and read == []
    damage(folder, 6)
    os.utime(at(folder, 6) / "rank_00000.safetensors", (1, 1))
    assert keep_last(folder, 1, verified=verified) == [at(folder, 2)] and set(read) == {"step_00000006"}


def test_what_could_not_be_read_in_time_does_not_count_yet(tmp_path: Path) -> None:
    folder, verified = write(tmp_path, 2, 4, 6, 8), Verified()
    assert keep_last(folder, 1, verified=verified, limit_s=-1.0) == []
    verified.trust(at(folder, 6))
    assert keep_last(folder, 1, verified=verified, limit_s=-1.0) == [at(folder, 2), at(folder, 4)]
    assert keep_last(folder, 1, verified=verified) == [at(folder, 6)]


def test_steps_of_a_future_that_the_run_left_neither_count_nor_go(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4, 10, 12, 6)
    assert keep_last(folder, 1, upto=6) == [at(folder, 2), at(folder, 4)]
    assert [entry.step for entry in list_checkpoints(folder)] == [6, 10, 12]


def test_latest_has_to_be_a_name_of_a_checkpoint_beside_it(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    write(tmp_path / "other", 4)
    elsewhere = b"../other/checkpoints/step_00000004"
    for content in (elsewhere, b"\xff", b"step_0000000\xd9\xa2", b"step_00000002\0", b"{}", b"/"):
        (folder / "latest").write_bytes(content)
        assert read_latest(folder) is None
    (folder / "latest").unlink()
    (folder / "latest").mkdir()
    assert read_latest(folder) is None
