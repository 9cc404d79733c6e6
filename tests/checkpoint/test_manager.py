"""The checkpoint manager: reports published checkpoints, the same on all ranks, and removes old ones."""

import os
import time
from pathlib import Path

import pytest
import torch

from megastack.checkpoint import asynchronous as asynchronous_module
from megastack.checkpoint import writer
from megastack.checkpoint.folder import list_checkpoints, newest_complete
from megastack.checkpoint.manager import CheckpointManager
from megastack.checkpoint.state import State, StateItem
from megastack.errors import CheckpointError, MegastackError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.ranks import run_ranks
from tests.checkpoint.test_asynchronous import slow_down


def state(step: int) -> State:
    return State([StateItem.replicated("model/w", torch.full((4,), float(step)))], {"step": step})


def test_a_blocking_save_is_reported_at_once(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, Mesh.single())
    (saved,) = manager.save(2, state(2))
    assert (saved.step, saved.path) == (2, tmp_path / "step_00000002")
    assert 0 < saved.write_seconds <= saved.seconds
    assert not manager.busy and manager.wait() == []


def save_asynchronously(root: Path) -> list[list[int]]:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    fast = writer.write_tensors
    slow_down(0.2)
    manager, reported = CheckpointManager(root, mesh, asynchronous=True, keep=2, every=4), []
    for step in (2, 4, 6, 8, 10):
        reported.append([saved.step for saved in manager.save(step, state(step))])
        assert manager.busy or mesh.rank  # the first rank writes what both hold
    (last,) = manager.wait()
    vars(writer)["write_tensors"] = fast
    return [*reported, [last.step]]


def test_an_asynchronous_save_is_reported_when_it_is_published(tmp_path: Path) -> None:
    expected = [[], [2], [4], [6], [8], [10]]
    assert run_ranks(save_asynchronously, 2, tmp_path) == [expected, expected]
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [4, 8, 10]  # the two newest and what 4 divides


def test_waiting_counts_as_time_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = writer.write_tensors
    monkeypatch.setattr(writer, "write_tensors", lambda *given: time.sleep(0.3) or fast(*given))
    manager = CheckpointManager(tmp_path, Mesh.single(), asynchronous=True)
    manager.save(2, state(2))
    (saved,) = manager.wait()
    assert saved.seconds >= 0.25 and saved.write_seconds >= 0.3


def test_an_error_of_the_writer_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    manager = CheckpointManager(tmp_path, Mesh.single(), asynchronous=True)
    manager.save(4, state(4))
    manager.wait()
    with monkeypatch.context() as patch:
        patch.setattr(asynchronous_module, "complete", full)
        manager.save(6, state(6))
        with pytest.raises(CheckpointError, match=r"step_00000006: was not saved\nrank 0: .*No space left"):
            manager.save(8, state(8))
    assert newest_complete(tmp_path) == tmp_path / "step_00000004"
    assert [saved.step for saved in [*manager.save(8, state(8)), *manager.wait()]] == [8]
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000004", "step_00000008"]


def test_a_damaged_newest_keeps_the_one_that_can_be_resumed(tmp_path: Path) -> None:
    """One of an earlier process with the right size, and one of this process that is damaged after it was written."""
    for step in (2, 4, 6):
        CheckpointManager(tmp_path, Mesh.single()).save(step, state(step))
    _flip(tmp_path, 6)
    manager = CheckpointManager(tmp_path, Mesh.single(), keep=2, loaded=tmp_path / "step_00000004")
    manager.save(5, state(5))
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [4, 5, 6]
    _flip(tmp_path, 5)
    manager.save(7, state(7))
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [4, 5, 6, 7]


def _flip(folder: Path, step: int) -> None:
    file = folder / f"step_{step:08d}" / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_manager_that_may_no_longer_write_removes_nothing(tmp_path: Path) -> None:
    """Neither checkpoints nor a folder that the new owner writes under the same name."""
    for step in (2, 4):
        CheckpointManager(tmp_path, Mesh.single()).save(step, state(step))

    def lost() -> None:
        raise MegastackError("taken over")

    for asynchronous in (False, True):
        manager = CheckpointManager(tmp_path, Mesh.single(), asynchronous=asynchronous, keep=1, guard=lost)
        (tmp_path / ".step_00000006.writing").mkdir(exist_ok=True)
        with pytest.raises(CheckpointError, match="taken over"):
            manager.save(6, state(6))
            manager.wait()
        assert sorted(os.listdir(tmp_path)) == [".step_00000006.writing", "latest", "step_00000002", "step_00000004"]
