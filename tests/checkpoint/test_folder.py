"""The checkpoints of a run: listing, finding, resuming, removing."""

import os
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megastack.checkpoint import integrity
from megastack.checkpoint.folder import (
    NoCheckpointError,
    Resume,
    checkpoint_error,
    find_checkpoint,
    keep_last,
    list_checkpoints,
    newest_complete,
    read_latest,
    resolve_resume,
)
from megastack.checkpoint.integrity import VerifiedFiles
from megastack.checkpoint.manifest import FileRecord, dump_manifest, read_manifest
from megastack.checkpoint.save import save
from megastack.checkpoint.state import State, StateItem
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


def test_checkpoints_are_listed_by_step_with_their_errors(tmp_path: Path) -> None:
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


def test_latest_is_none_if_its_target_does_not_exist(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    assert read_latest(folder) == at(folder, 2)
    for content in ("step_00000009", "../../etc", ""):
        (folder / "latest").write_text(content)
        assert read_latest(folder) is None
    assert read_latest(tmp_path) is None


def test_no_resume_is_fresh_and_rejects_a_folder_with_checkpoints(tmp_path: Path) -> None:
    assert resolve_resume(None, None, tmp_path) == Resume()
    assert resolve_resume(None, tmp_path / "new", tmp_path) == Resume()
    write(tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match=r"resume=null: run.dir=.*step_00000002.*resume=auto"):
        resolve_resume(None, tmp_path / "run", tmp_path)


def test_auto_resumes_the_newest_of_its_run_else_starts_fresh(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert resolve_resume("auto", run, tmp_path) == Resume(None, run)
    folder = write(run, 2, 10, 4)
    assert resolve_resume("auto", str(run), tmp_path) == Resume(at(folder, 10), run)
    with pytest.raises(CheckpointError, match="resume=auto: needs a run folder"):
        resolve_resume("auto", None, tmp_path)


def test_a_damaged_newest_is_skipped_or_rejected(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = write(run, 2, 4)
    file = damage(folder, 4)
    for resume in ("auto", "last"):
        found = resolve_resume(resume, run, tmp_path)
        assert (found.checkpoint, found.run_dir) == (at(folder, 2), run)
        assert [str(file) in error for error in found.skipped] == [True]
        with pytest.raises(CheckpointError, match=r"on_corrupt=refuse: .*rank_00000.safetensors: crc32"):
            resolve_resume(resume, run, tmp_path, on_corrupt="refuse")


def test_last_resumes_the_newest_run_under_the_root(tmp_path: Path) -> None:
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
        message = rf"={inside}: is not a usable checkpoint \({file}: crc32 .*\); use {at(folder, 2)}, or null"
        with pytest.raises(CheckpointError, match=message):
            resolve_resume(str(inside), None, tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere: is not a usable checkpoint \(no such folder\)"):
        resolve_resume(str(tmp_path / "nowhere"), None, tmp_path)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4, 6, 8, 10)
    assert keep_last(folder, 2) == [at(folder, step) for step in (2, 4, 6)]
    assert sorted(os.listdir(folder)) == ["latest", "step_00000008", "step_00000010"]
    assert newest_complete(folder) == at(folder, 10)
    with pytest.raises(CheckpointError, match="keep_last=0"):
        keep_last(folder, 0)


def test_multiples_and_the_one_that_latest_names_are_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 3, 4, 5, 6)
    (folder / "latest").write_text("step_00000003\n")
    keep_last(folder, 1, every=4)
    assert [entry.step for entry in list_checkpoints(folder)] == [3, 4, 6]


def test_foreign_files_are_never_removed(tmp_path: Path) -> None:
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


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4, 6)
    damage(folder, 6, "truncate")
    assert keep_last(folder, 1) == [at(folder, 2)]
    assert [entry.step for entry in list_checkpoints(folder)] == [4, 6]


def test_a_checkpoint_counts_as_kept_if_a_resume_would_accept_it(tmp_path: Path) -> None:
    """Corruption that only the content shows: the checkpoint that resume=auto falls back to is kept."""
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


def test_invalid_trainer_state_is_damage_too(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4)
    path = at(folder, 4)
    manifest = read_manifest(path)
    text = '{"step": -4}\n'
    (path / "trainer.json").write_text(text)
    record = FileRecord("trainer.json", len(text), zlib.crc32(text.encode()))
    (path / "manifest.json").write_text(dump_manifest(replace(manifest, files={**manifest.files, record.name: record})))
    assert resolve_resume("auto", tmp_path, tmp_path).checkpoint == at(folder, 2)
    assert keep_last(folder, 1) == []


def test_verified_files_are_read_again_only_if_they_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, verified, read = write(tmp_path, 2, 4, 6), VerifiedFiles(), list[str]()
    file_error = integrity.file_error
    monkeypatch.setattr(
        integrity, "file_error", lambda f, file, *given: read.append(f.name) or file_error(f, file, *given)
    )
    verified.add(at(folder, 6))
    assert keep_last(folder, 3, verified=verified) == []
    assert set(read) == {"step_00000002", "step_00000004"}
    read.clear()
    assert keep_last(folder, 3, verified=verified) == [] and read == []
    damage(folder, 6)
    os.utime(at(folder, 6) / "rank_00000.safetensors", (1, 1))
    assert keep_last(folder, 1, verified=verified) == [at(folder, 2)] and set(read) == {"step_00000006"}


def test_a_checkpoint_not_verified_in_time_does_not_count(tmp_path: Path) -> None:
    folder, verified = write(tmp_path, 2, 4, 6, 8), VerifiedFiles()
    assert keep_last(folder, 1, verified=verified, limit_s=-1.0) == []
    verified.add(at(folder, 6))
    assert keep_last(folder, 1, verified=verified, limit_s=-1.0) == [at(folder, 2), at(folder, 4)]
    assert keep_last(folder, 1, verified=verified) == [at(folder, 6)]


def test_steps_beyond_the_current_one_neither_count_nor_are_removed(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4, 10, 12, 6)
    assert keep_last(folder, 1, upto=6) == [at(folder, 2), at(folder, 4)]
    assert [entry.step for entry in list_checkpoints(folder)] == [6, 10, 12]


def test_latest_must_name_a_checkpoint_in_the_same_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    write(tmp_path / "other", 4)
    elsewhere = b"../other/checkpoints/step_00000004"
    for content in (elsewhere, b"\xff", b"step_0000000\xd9\xa2", b"step_00000002\0", b"{}", b"/"):
        (folder / "latest").write_bytes(content)
        assert read_latest(folder) is None
    (folder / "latest").unlink()
    (folder / "latest").mkdir()
    assert read_latest(folder) is None


def test_a_run_folder_refers_to_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2, 10, 4)
    for path in (tmp_path / "run", folder, at(folder, 10)):
        assert find_checkpoint(path) == at(folder, 10)
        assert resolve_resume(str(path), None, tmp_path) == Resume(at(folder, 10))
    assert find_checkpoint(at(folder, 4)) == at(folder, 4)


def test_an_import_refers_to_its_weights_and_cannot_be_resumed(tmp_path: Path) -> None:
    save(tmp_path / "weights", State([], {"step": 0, "imported": {}}), Mesh.single())
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "weights") == tmp_path / "weights"
    with pytest.raises(CheckpointError, match=rf"resume={tmp_path}: is an import, .*; use checkpoint.load_weights="):
        resolve_resume(str(tmp_path), None, tmp_path)


def test_a_checkpoint_by_any_name(tmp_path: Path) -> None:
    save(tmp_path / "mine", State([], {"step": 3}), Mesh.single())
    assert find_checkpoint(tmp_path / "mine", content=True) == tmp_path / "mine"


def test_a_damaged_newest_is_an_error_that_names_the_previous_one(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4)
    damage(folder, 4, "truncate")
    for path in (tmp_path, folder):
        with pytest.raises(NoCheckpointError, match=rf"rank_00000.safetensors: .*truncated\)\); use {at(folder, 2)}$"):
            find_checkpoint(path)


def test_an_interrupted_replacement_is_found_under_its_hidden_name(tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    at(folder, 4).rename(folder / ".step_00000004.replaced")
    for path in (tmp_path, folder):
        assert find_checkpoint(path) == folder / ".step_00000004.replaced"


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "no such folder"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: path.mkdir(), "an empty folder"),
        (lambda path: (path / "checkpoints").mkdir(parents=True), "it holds checkpoints"),
        (lambda path: [(path / name).mkdir(parents=True) for name in "abcdef"], "it holds a, b, c, d and 2 more"),
        (lambda path: (path / "step_00000002").mkdir(parents=True), "step_00000002/manifest.json: missing"),
    ],
)
def test_the_error_says_what_else_the_path_is(tmp_path: Path, make: object, found: str) -> None:
    path = tmp_path / "given"
    make(path)  # type: ignore[operator]
    with pytest.raises(NoCheckpointError, match=rf"^{path}: no usable checkpoint \(.*{found}.*\); use "):
        find_checkpoint(path)
    with pytest.raises(CheckpointError, match=rf"^resume={path}: is not a usable checkpoint \(.*{found}.*\); use "):
        resolve_resume(str(path), None, tmp_path)
