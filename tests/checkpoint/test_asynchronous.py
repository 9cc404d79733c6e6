"""Saving while training continues: the checkpoint holds the step it is named for, and every failure is reported."""

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from megastack.checkpoint import asynchronous, writer
from megastack.checkpoint.asynchronous import StagingBuffer
from megastack.checkpoint.folder import list_checkpoints, newest_complete, read_latest
from megastack.checkpoint.load import load
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.checkpoint.state import State, StateItem
from megastack.errors import CheckpointError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.placement.boxes import Box
from megastack.testing.ranks import RankFailure, run_ranks
from tests.checkpoint.state_cuts import CUTS, TENSORS, same_bits, state_of, tensor_of


def slow_down(seconds: float) -> None:
    """Make every write of a file on this rank take longer."""
    fast = writer.write_tensors

    def slow(*arguments: object) -> object:
        time.sleep(seconds)
        return fast(*arguments)  # type: ignore[arg-type]

    vars(writer)["write_tensors"] = slow


def rows(rank: int, world: int, step: int) -> State:
    """A replicated tensor and one that is sharded by rows, with values that identify the step."""
    replicated, shard = torch.full((5,), float(step)), torch.full((2, 3), step + 0.5)
    cut = StateItem("optim/exp_avg/w", (2 * world, 3), ((Box((2 * rank, 0), (2, 3)), shard),))
    return State([StateItem.replicated("model/w", replicated), cut], {"step": step})


def train_on(root: Path, slow_rank: int) -> bool:
    """Whether the checkpoint existed when the call returned, which is too early with a slow writer."""
    mesh = Mesh.from_environment(MeshShape(dp=3))
    fast = writer.write_tensors
    if mesh.rank == slow_rank:
        slow_down(0.5)
    state = rows(mesh.rank, 3, 3)
    handle = save(root / "step_00000003", state, mesh, asynchronous=True)
    early = (root / "step_00000003").exists()
    for item in state.items:  # two more steps, in place
        for _, tensor in item.boxes:
            tensor.add_(1.0).add_(1.0)
    state.trainer["step"] = 5
    vars(writer)["write_tensors"] = fast
    second = save(root / "step_00000005", state, mesh, asynchronous=True)
    assert (root / "step_00000003").is_dir() and handle.done and handle.settled
    for item in state.items:
        for _, tensor in item.boxes:
            tensor.zero_()
    assert second.wait() == root / "step_00000005"
    return early


@pytest.mark.parametrize("slow_rank", [0, 2])
def test_the_checkpoint_holds_the_step_it_is_named_for_while_training_continues(tmp_path: Path, slow_rank: int) -> None:
    assert run_ranks(train_on, 3, tmp_path, slow_rank) == [False] * 3
    for step in (3, 5):
        reader = CheckpointReader(tmp_path / f"step_{step:08d}")
        assert torch.equal(reader.read("model/w"), torch.full((5,), float(step)))
        assert torch.equal(reader.read("optim/exp_avg/w"), torch.full((6, 3), step + 0.5))
        assert reader.trainer == {"step": step}
        assert all(name.startswith(("rank_", "manifest", "trainer")) for name in os.listdir(reader.path))
        assert not list(reader.path.glob("rank_*.json")) and not list(reader.path.glob("*.part"))
    assert read_latest(tmp_path) == tmp_path / "step_00000005"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000003", "step_00000005"]


def fail_in_the_copy(root: Path) -> list[str]:
    """What is left in the folder once the first rank has finished a save whose copy failed on the second."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    state = rows(mesh.rank, 2, 3)
    if mesh.rank:
        with mock.patch.object(StagingBuffer, "copy", side_effect=MemoryError("no room")), pytest.raises(MemoryError):
            save(root / "step_00000003", state, mesh, asynchronous=True)
    else:
        handle, end = save(root / "step_00000003", state, mesh, asynchronous=True), time.monotonic() + 20
        while not handle.done and time.monotonic() < end:
            time.sleep(0.01)
        assert handle.done
    torch.distributed.barrier()
    return os.listdir(root)


def test_a_rank_without_memory_for_the_copy_does_not_block_the_others(tmp_path: Path) -> None:
    assert run_ranks(fail_in_the_copy, 2, tmp_path) == [[], []]


def save_cuts(root: Path) -> None:
    mesh = Mesh.from_environment(MeshShape(tp=2))
    for cut in CUTS:
        save(root / cut, state_of(cut, mesh.rank, 2), mesh, asynchronous=True)
    save(root / "last", state_of("rows", mesh.rank, 2), mesh)  # a blocking save waits for the one in flight as well


def test_every_dtype_and_sharding_is_saved_bitwise(tmp_path: Path) -> None:
    run_ranks(save_cuts, 2, tmp_path)
    for folder in (*CUTS, "last"):
        reader = CheckpointReader(tmp_path / folder)
        reader.verify()
        assert all(same_bits(reader.read(name), tensor_of(name)) for name in TENSORS)


def fail_in_the_writer(root: Path, weak_rank: int, surfaces: str) -> tuple[str, list[str]]:
    """Step 2 is saved, step 4 fails on one rank while it is written."""
    mesh = Mesh.from_environment(MeshShape(dp=2))
    values = torch.arange(80_000.0) + mesh.rank
    state = State([StateItem.replicated(f"model/w{mesh.rank}", values)])
    save(root / "step_00000002", state, mesh, asynchronous=True).wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if mesh.rank == weak_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    try:
        handle = save(root / "step_00000004", state, mesh, asynchronous=True)
        if surfaces == "wait":
            handle.wait()
        else:
            save(root / "step_00000006", state, mesh, asynchronous=surfaces == "save")
    except CheckpointError as error:
        seen = sorted(os.listdir(root))
        torch.distributed.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with pytest.raises(CheckpointError, match="step_00000004"):
            handle.wait()
        save(root / "step_00000008", state, mesh, asynchronous=True).wait()  # the error is reported once
        return str(error), seen
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return "no error", []


@pytest.mark.parametrize("surfaces", ["wait", "save", "blocking save"])
@pytest.mark.parametrize("weak_rank", [0, 1])
def test_an_error_of_the_writer_is_raised_on_all_ranks(tmp_path: Path, weak_rank: int, surfaces: str) -> None:
    (first, seen), second = run_ranks(fail_in_the_writer, 2, tmp_path, weak_rank, surfaces)
    assert (first, seen) == second
    assert f"rank {weak_rank}: " in first and f"rank_0000{weak_rank}.safetensors" in first and "File too large" in first
    assert seen == ["latest", "step_00000002"]
    assert [entry.step for entry in list_checkpoints(tmp_path) if entry.complete] == [2, 8]
    assert newest_complete(tmp_path) == tmp_path / "step_00000008"


def fail_in_the_plan(root: Path, problem: str) -> str:
    mesh = Mesh.from_environment(MeshShape(tp=3))
    names = ["model/w", "model/w"] if problem == "twice" and mesh.rank == 1 else ["model/w"]
    trainer = {"bad": {1, 2}} if problem == "trainer" and mesh.rank == 0 else {}
    size = 4 if problem == "shape" and mesh.rank == 2 else 3
    state = State([StateItem.replicated(name, torch.zeros(size)) for name in names], trainer)
    try:
        save(root / "step_00000002", state, mesh, asynchronous=True)
    except CheckpointError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("problem", "message"),
    [("twice", "rank 1: model/w: occurs 2 times"), ("trainer", "plain JSON"), ("shape", "rank 2 shape (4,)")],
)
def test_an_invalid_state_is_an_error_of_the_call(tmp_path: Path, problem: str, message: str) -> None:
    errors = run_ranks(fail_in_the_plan, 3, tmp_path, problem)
    assert len(set(errors)) == 1 and message in errors[0]
    assert os.listdir(tmp_path) == []


def end_without_waiting(root: Path) -> None:
    slow_down(0.3)
    save(root / "step_00000002", state_of("whole", 0, 1), Mesh.single(), asynchronous=True)


def test_the_program_does_not_exit_before_the_write(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=end_without_waiting, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == 0
    state = state_of("rows", 0, 1, blank=True)
    load(tmp_path / "step_00000002", state, Mesh.single())


def wait_for_a_rank_that_dies(root: Path, killed: int, when: str) -> str:
    mesh = Mesh.from_environment(MeshShape(dp=2))
    state = rows(mesh.rank, 2, 2)
    save(root / "step_00000002", state, mesh)
    place = {"writing": (writer, "write_tensors"), "reporting": (asynchronous.AsynchronousSave, "_send_report")}
    place["publishing"] = (asynchronous, "complete")
    if mesh.rank == killed:
        owner, name = place[when]
        setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    handle = save(root / "step_00000004", state, mesh, asynchronous=True)
    try:
        handle.wait()
    except CheckpointError as error:
        assert "a rank has exited" in str(error)
        raise
    return "no error"


@pytest.mark.parametrize(("killed", "when"), [(0, "writing"), (1, "writing"), (1, "reporting"), (0, "publishing")])
def test_after_a_rank_is_killed_nothing_is_published_and_no_rank_hangs(tmp_path: Path, killed: int, when: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(wait_for_a_rank_that_dies, 2, tmp_path, killed, when)
    assert time.monotonic() - began < 10
    assert "did not return" not in str(failure.value)
    assert newest_complete(tmp_path) == tmp_path / "step_00000002" == read_latest(tmp_path)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [2]
    save(tmp_path / "step_00000004", state_of("whole", 0, 1), Mesh.single(), asynchronous=True).wait()
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000002", "step_00000004"]
