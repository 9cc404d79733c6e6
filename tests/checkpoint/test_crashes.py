"""A rank is killed at any point of a save: no incomplete checkpoint is chosen, all ranks agree, no rank hangs."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from megastack.checkpoint import publish, tensor_files, writer
from megastack.checkpoint.folder import list_checkpoints, newest_complete, read_latest, resolve_resume
from megastack.checkpoint.load import load
from megastack.checkpoint.save import save
from megastack.checkpoint.state import State, StateItem
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.ranks import RankFailure, run_ranks

LENGTH = 100_000


def state(rank: int, step: int) -> State:
    return State([StateItem.replicated(f"model/w{rank}", torch.arange(float(LENGTH)) + step)], {"step": step})


def kill_this_process(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die(point: str) -> None:
    """Make this rank be killed at a point of its next save."""
    if point == "before its shard":
        vars(writer)["write_tensors"] = kill_this_process
    elif point == "during its shard":
        write = tensor_files._write
        vars(tensor_files)["_write"] = lambda fd, data, crc: (
            write(fd, data[: len(data) // 2], crc) and kill_this_process()
        )
    elif point == "after its shard":
        write_tensors = writer.write_tensors
        vars(writer)["write_tensors"] = lambda *given: kill_this_process(write_tensors(*given))
    elif point == "before the manifest":
        vars(writer)["write_texts"] = kill_this_process
    elif point == "before the rename":
        vars(writer)["publish"] = kill_this_process
    else:
        vars(writer)["update_latest"] = kill_this_process


def save_and_die(root: Path, killed: int, point: str) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=3))
    save(root / "step_00000002", state(mesh.rank, 2), mesh)
    if mesh.rank == killed:
        die(point)
    save(root / "step_00000004", state(mesh.rank, 4), mesh)


def load_newest(root: Path) -> tuple[Path | None, int, bool]:
    """The checkpoint that a rank finds and loads after the crash, and whether the values belong to the step."""
    mesh = Mesh.from_environment(MeshShape(dp=3))
    path = newest_complete(root)
    assert path is not None
    blank = State([StateItem.replicated(f"model/w{mesh.rank}", torch.zeros(LENGTH))])
    step = load(path, blank, mesh).trainer["step"]
    return path, step, torch.equal(blank.items[0].boxes[0][1], state(mesh.rank, step).items[0].boxes[0][1])


@pytest.mark.parametrize(
    ("killed", "point"),
    [(rank, point) for point in ("before its shard", "during its shard", "after its shard") for rank in (0, 1, 2)]
    + [(0, point) for point in ("before the manifest", "before the rename", "before latest moves")],
)
def test_the_previous_checkpoint_is_complete_and_all_ranks_load_it(tmp_path: Path, killed: int, point: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(save_and_die, 3, tmp_path, killed, point)
    assert time.monotonic() - began < 15
    assert "did not return" not in str(failure.value)  # the others raised
    published = point == "before latest moves"
    step = 4 if published else 2
    chosen = tmp_path / f"step_{step:08d}"
    assert [entry.step for entry in list_checkpoints(tmp_path)] == ([2, 4] if published else [2])
    assert read_latest(tmp_path) == tmp_path / "step_00000002"
    assert run_ranks(load_newest, 3, tmp_path) == [(chosen, step, True)] * 3
    save(tmp_path / "step_00000004", State([], {"step": 4}), Mesh.single())
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000002", "step_00000004"]


def replace_and_die(root: Path) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    save(root / "step_00000002", state(mesh.rank, 1), mesh)
    save(root / "step_00000004", state(mesh.rank, 4), mesh)
    rename = os.rename
    if mesh.rank == 0:  # the old one is renamed, the new one is not yet published
        vars(publish)["os"].rename = lambda a, b: kill_this_process() if str(a).endswith(".writing") else rename(a, b)
    save(root / "step_00000004", state(mesh.rank, 5), mesh)


def test_a_crash_while_replacing_a_step_leaves_an_older_one(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(replace_and_die, 2, tmp_path)
    assert newest_complete(tmp_path) == tmp_path / "step_00000002"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def save_twice(root: Path) -> None:
    mesh = Mesh.from_environment(MeshShape(dp=3))
    for step in (2, 4):
        save(root / f"step_{step:08d}", state(mesh.rank, step), mesh)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
@pytest.mark.parametrize("name", ["rank_00001.safetensors", "manifest.json", "trainer.json"])
def test_damage_on_disk_falls_back_and_names_the_file(tmp_path: Path, damage: object, name: str) -> None:
    root = tmp_path / "checkpoints"
    run_ranks(save_twice, 3, root)
    assert callable(damage)
    damage(root / "step_00000004" / name)
    found = resolve_resume("auto", tmp_path, tmp_path)
    assert found.checkpoint == root / "step_00000002"
    assert len(found.skipped) == 1 and name in found.skipped[0]
    assert run_ranks(load_newest, 3, root) == [(root / "step_00000002", 2, True)] * 3
