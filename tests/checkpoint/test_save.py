"""Saving: the files on disk, and the state of the folder after a failure of any rank."""

import os
import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megastack.checkpoint.folder import list_checkpoints, newest_complete, read_latest
from megastack.checkpoint.load import load
from megastack.checkpoint.manifest import read_manifest
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.checkpoint.state import State, StateItem
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.ranks import run_ranks
from tests.checkpoint.state_cuts import CUTS, TENSORS, same_bits, state_of, tensor_of, wrong_items


def save_cuts(root: Path, cuts: tuple[str, ...]) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=torch.distributed.get_world_size()))
    for cut in cuts:
        save(root / cut, state_of(cut, mesh.rank, mesh.world.size), mesh).wait()


def test_a_checkpoint_is_safetensors_and_json_with_each_element_once(tmp_path: Path) -> None:
    run_ranks(save_cuts, 3, tmp_path, CUTS)
    for cut in CUTS:
        names = {path.name for path in (tmp_path / cut).iterdir()}
        assert {"manifest.json", "trainer.json"} < names
        counts = dict.fromkeys(TENSORS, 0)
        for file in sorted(names - {"manifest.json", "trainer.json"}):
            assert re.fullmatch(r"rank_0000[012]\.safetensors", file)
            with safe_open(tmp_path / cut / file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    name, offset = key.rsplit("@", 1)
                    start = [int(index) for index in offset.split(",")] if offset else []
                    found = opened.get_tensor(key)
                    where = tuple(slice(first, first + size) for first, size in zip(start, found.shape, strict=True))
                    assert same_bits(found, tensor_of(name)[where])
                    counts[name] += found.numel()
        assert counts == {name: tensor_of(name).numel() for name in TENSORS}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(CUTS)  # no `latest`, nothing left over


def test_one_rank_needs_no_process_group(tmp_path: Path) -> None:
    mesh = Mesh.single()
    path = save(str(tmp_path / "checkpoints" / "step_00000010"), state_of("flat", 0, 1), mesh).wait()
    assert not torch.distributed.is_initialized()
    assert sorted(os.listdir(path)) == ["manifest.json", "rank_00000.safetensors", "trainer.json"]
    state = state_of("rows", 0, 1, blank=True)
    assert load(path, state, mesh).trainer == {"step": 10, "cut": "flat"} == state.trainer
    assert wrong_items(state) == []


def test_latest_follows_the_newest_save(tmp_path: Path) -> None:
    for step in (2, 4):
        path = save(tmp_path / f"step_{step:08d}", state_of("whole", 0, 1), Mesh.single()).wait()
        assert read_latest(tmp_path) == path
    assert (tmp_path / "latest").read_text() == "step_00000004\n"


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "step_00000002"
    for value in (1.0, 2.0):
        save(path, State([StateItem.replicated("model/w", torch.full((3,), value))]), Mesh.single())
        assert CheckpointReader(path).read("model/w").tolist() == [value] * 3
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000002"]


def test_a_folder_with_foreign_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        save(tmp_path / "step_00000002", state_of("whole", 0, 1), Mesh.single())
    assert (tmp_path / "step_00000002" / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["step_00000002"]


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".step_00000002.writing"
    stale.mkdir()
    (stale / "rank_00007.safetensors").write_bytes(b"half")
    path = save(tmp_path / "step_00000002", state_of("whole", 0, 1), Mesh.single()).wait()
    assert not stale.exists()
    assert not (path / "rank_00007.safetensors").exists()


def test_trainer_state_must_be_json(tmp_path: Path) -> None:
    for trainer in ({"loss": float("nan")}, {"path": tmp_path}):
        with pytest.raises(CheckpointError, match="plain JSON"):
            save(tmp_path / "step_00000002", State([], trainer), Mesh.single())
    assert os.listdir(tmp_path) == []


def save_under_a_file_size_limit(root: Path, weak_rank: int) -> tuple[str, list[str]]:
    """Save step 2, then step 4 with one rank unable to write more than 64 KiB to a file."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    values = torch.arange(80_000.0) + mesh.rank
    state = State([StateItem.replicated(f"model/w{mesh.rank}", values)], {"step": 2})
    save(root / "step_00000002", state, mesh)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if mesh.rank == weak_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    try:
        save(root / "step_00000004", state, mesh)
    except CheckpointError as error:
        seen = sorted(os.listdir(root))
        blank = State([StateItem.replicated(f"model/w{mesh.rank}", torch.zeros(80_000))])
        load(root / "step_00000002", blank, mesh)
        assert torch.equal(blank.items[0].boxes[0][1], values)
        return str(error), seen
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return "no error", []


@pytest.mark.parametrize("weak_rank", [0, 1])
def test_a_rank_that_cannot_write_fails_all_and_leaves_the_previous(tmp_path: Path, weak_rank: int) -> None:
    (first, first_seen), (second, second_seen) = run_ranks(save_under_a_file_size_limit, 2, tmp_path, weak_rank)
    assert first == second
    assert f"rank {weak_rank}: " in first and f"rank_0000{weak_rank}.safetensors" in first and "File too large" in first
    assert first_seen == second_seen == ["latest", "step_00000002"]
    assert newest_complete(tmp_path) == tmp_path / "step_00000002" == read_latest(tmp_path)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [2]


def fail_on_one_rank(root: Path, problem: str) -> str:
    mesh = Mesh.from_environment(MeshShape(tp=3))
    names = ["model/w", "model/w"] if problem == "twice" and mesh.rank == 1 else ["model/w"]
    trainer = {"bad": {1, 2}} if problem == "trainer" and mesh.rank == 0 else {}
    size = 4 if problem == "shape" and mesh.rank == 2 else 3
    try:
        save(root / "step_00000002", State([StateItem.replicated(n, torch.zeros(size)) for n in names], trainer), mesh)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("problem", "message"),
    [("twice", "rank 1: model/w: occurs 2 times"), ("trainer", "plain JSON"), ("shape", r"rank 2 shape \(4,\)")],
)
def test_an_invalid_state_of_any_rank_is_the_same_error_on_all(tmp_path: Path, problem: str, message: str) -> None:
    errors = run_ranks(fail_on_one_rank, 3, tmp_path, problem)
    assert len(set(errors)) == 1
    assert re.search(message, errors[0])
    assert os.listdir(tmp_path) == []


def save_in_a_file(root: Path) -> str:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    try:
        save(root / "file" / "step_00000002", State([]), mesh)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_folder_that_cannot_be_made_is_the_same_error_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = run_ranks(save_in_a_file, 2, tmp_path)
    assert errors[0] == errors[1]
    assert "NotADirectoryError" in errors[0]


def test_saving_does_not_change_the_state_and_the_manifest_names_every_file(tmp_path: Path) -> None:
    state = state_of("rows", 0, 1)
    path = save(tmp_path / "x", state, Mesh.single()).wait()
    assert wrong_items(state) == []
    manifest = read_manifest(path)
    assert {*manifest.files, "manifest.json"} == set(os.listdir(path))
    assert all(file.size == (path / name).stat().st_size for name, file in manifest.files.items())
