"""What a path means, for every command and key: a checkpoint, a run, a checkpoints folder, an import; or what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastack.checkpoint.find import NoCheckpointError, find_checkpoint
from megastack.checkpoint.folder import Resume, resolve_resume
from megastack.checkpoint.items import State
from megastack.checkpoint.save import save
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh
from tests.checkpoint.test_folder import at, damage, write


def test_a_run_and_its_checkpoints_mean_the_newest(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2, 10, 4)
    for path in (tmp_path / "run", folder, at(folder, 10)):
        assert find_checkpoint(path) == at(folder, 10)
        assert resolve_resume(str(path), None, tmp_path) == Resume(at(folder, 10))
    assert find_checkpoint(at(folder, 4)) == at(folder, 4)


def test_an_import_means_its_weights_and_is_not_resumed(tmp_path: Path) -> None:
    save(tmp_path / "weights", State([], {"step": 0, "imported": {}}), Mesh.single())
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "weights") == tmp_path / "weights"
    with pytest.raises(CheckpointError, match=rf"resume={tmp_path}: is an import, .*; use checkpoint.load_weights="):
        resolve_resume(str(tmp_path), None, tmp_path)


def test_a_checkpoint_by_any_name(tmp_path: Path) -> None:
    save(tmp_path / "mine", State([], {"step": 3}), Mesh.single())
    assert find_checkpoint(tmp_path / "mine", content=True) == tmp_path / "mine"


def test_a_damaged_newest_is_an_error_that_names_the_one_before(tmp_path: Path) -> None:
    folder = write(tmp_path, 2, 4)
    damage(folder, 4, "truncate")
    for path in (tmp_path, folder):
        with pytest.raises(NoCheckpointError, match=rf"rank_00000.safetensors: .*truncated\)\); use {at(folder, 2)}$"):
            find_checkpoint(path)


def test_a_replacement_that_was_cut_short_is_found_where_it_is(tmp_path: Path) -> None:
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
def test_anything_else_is_named(tmp_path: Path, make: object, found: str) -> None:
    path = tmp_path / "given"
    make(path)  # type: ignore[operator]
    with pytest.raises(NoCheckpointError, match=rf"^{path}: no checkpoint that can be used \(.*{found}.*\); use "):
        find_checkpoint(path)
    with pytest.raises(CheckpointError, match=rf"^resume={path}: is not a usable checkpoint \(.*{found}.*\); use "):
        resolve_resume(str(path), None, tmp_path)
