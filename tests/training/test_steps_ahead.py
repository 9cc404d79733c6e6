"""A loop that launches a step before it reads the results of the previous one does and records the same things."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megastack
from megastack.assemble.data import read_dataset
from megastack.assemble.loop import build_loop
from megastack.assemble.training import build_training
from megastack.batch import Microbatch, copy_microbatches
from megastack.checkpoint.reader import CheckpointReader
from megastack.comm.transfers import ALIGNMENT, packed_copy
from megastack.config.layout_rules import mesh_shape
from megastack.data.loader import Loader
from megastack.errors import DataError
from megastack.mesh.mesh import Mesh
from megastack.observe.folder import RunFolder
from megastack.testing.ranks import run_ranks
from megastack.training.host_reads import STEP, HostRead
from megastack.training.loop import Loop
from megastack.training.signals import StopRequest
from megastack.training.state import Hooks, RunResult
from megastack.training.step import TrainStep
from tests.faulty_mlp import fault
from tests.tiny_runs import overrides, rows

TIMES = {
    "time",
    "model_tflops_per_device",
    "exposed_s",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "peak_memory_bytes",
    "peak_memory_rank",
    "seconds",
}
TIMES |= {"write_seconds", "train_s", "data_s", "path"}
SMALL = ("model.layers=1", "batch.global_size=2", "batch.sequence_length=8")
QUIET = ("run.validate_every=0", "data.validation_fraction=0", "checkpoint.at_end=true")


def loop_of(folder: Path, ahead: int, *more: str, resume: Path | None = None, hooks: Hooks | None = None) -> Loop:
    """The loop of a tiny run in ``folder/ahead_N``; its mesh has the ranks of this job."""
    config = megastack.compose([*overrides(folder), *SMALL, *more])
    shape = mesh_shape(config)
    mesh = Mesh.single() if shape.world_size == 1 else Mesh.from_environment(shape, device="cpu")
    place = RunFolder(folder / f"ahead_{ahead}")
    place.path.mkdir(exist_ok=True)
    training = build_training(config, mesh, read_dataset(config))
    if resume is not None:
        training.restore(resume)
    return replace(build_loop(training, place, StopRequest(), hooks, resume), steps_ahead=ahead)


def record(folder: Path, ahead: int) -> list[dict[str, Any]]:
    """Every row of ``metrics.jsonl`` in order, without times."""
    lines = (folder / f"ahead_{ahead}" / "metrics.jsonl").read_text().splitlines()
    return [{key: x for key, x in json.loads(line).items() if key not in TIMES} for line in lines]


def outcome(result: RunResult) -> tuple[object, ...]:
    return result.status, result.step, result.loss, result.reason, result.rank, result.coordinates


def assert_equal_checkpoints(folder: Path, step: int) -> None:
    first, second = (CheckpointReader(RunFolder(folder / f"ahead_{n}").checkpoint(step)) for n in (0, 1))
    assert set(first.names) == set(second.names)
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.names)


CASES = {
    "plain": ("run.steps=4", *QUIET),
    "validation and saves": (
        "run.steps=7",
        "run.validate_every=2",
        "checkpoint.every=3",
        "observe.dump_steps=[5]",
        "checkpoint.at_end=true",
    ),
    "non-finite": (fault("poison"), "run.steps=5", *QUIET),
    "non-finite at a save": (fault("poison"), "run.steps=5", "checkpoint.every=3", "run.on_nonfinite=skip", *QUIET),
    "non-finite, skipped": (fault("poison"), "run.steps=5", "run.on_nonfinite=skip", "model.dropout=0.1", *QUIET),
    "overflow": ("run.steps=8", "precision.compute=fp16", "optim=adamw", *QUIET),
    "fp16, skipped": (fault("poison"), "run.steps=5", "precision.compute=fp16", "run.on_nonfinite=skip", *QUIET),
}


SLOW = {"plain", "non-finite at a save", "fp16, skipped"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in CASES])
def test_the_records_and_the_final_state_are_those_of_a_loop_that_does_not_run_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "overflow":
        monkeypatch.setattr("megastack.assemble.optimizer.INITIAL", 2.0**20)
    calls: list[list[tuple[str, int]]] = [[], []]

    def hooks(seen: list[tuple[str, int]]) -> Hooks:
        return Hooks(
            [lambda row: seen.append(("step", row["step"]))],
            [lambda row: seen.append(("validation", row["step"]))],
            [lambda step, path: seen.append(("checkpoint", step))],
        )

    results = [loop_of(tmp_path, n, *CASES[name], hooks=hooks(calls[n])).run() for n in (0, 1)]
    assert outcome(results[0]) == outcome(results[1])
    assert record(tmp_path, 0) == record(tmp_path, 1) and calls[0] == calls[1]
    if name == "non-finite":
        assert (results[1].status, results[1].step) == ("diverged", 2)
    else:
        assert_equal_checkpoints(tmp_path, results[0].step)
    if name == "overflow":
        found = rows(tmp_path / "ahead_1")
        assert 0 < found[-1]["skipped"] < 8, "some steps overflow, and some do not"


def stopped(folder: Path, ahead: int) -> RunResult:
    """Stop a run of 9 steps from the hook of step 3."""
    loop = loop_of(folder, ahead, "run.steps=9", *QUIET)
    loop.hooks.on_step.append(lambda row: loop.stop._on_signal(15, None) if row["step"] == 3 else None)
    return loop.run()


def test_a_request_to_stop_completes_what_is_launched_and_a_resume_continues_it(tmp_path: Path) -> None:
    """The request is agreed on with the step launched after it, and read after the next."""
    results = [stopped(tmp_path, n) for n in (0, 1)]
    assert [(result.status, result.step) for result in results] == [("preempted", 4), ("preempted", 6)]
    assert results[0].reason == results[1].reason
    for n, result in enumerate(results):
        assert [row["step"] for row in rows(tmp_path / f"ahead_{n}")] == list(range(1, result.step + 1))
        saved = RunFolder(tmp_path / f"ahead_{n}").checkpoint(result.step)
        loop_of(tmp_path, n, "run.steps=9", *QUIET, resume=saved).run()
    found = [[row for row in record(tmp_path, n) if row["kind"] == "train"] for n in (0, 1)]
    assert len(found[0]) == 9 and found[0] == found[1]
    assert_equal_checkpoints(tmp_path, 9)


def test_the_rows_of_all_steps_before_an_error_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the data is known before its step; an error in a step comes when the previous one is in flight."""
    read, call = Loader.step, TrainStep.__call__

    def unreadable(self: Loader, step: int) -> list[Microbatch]:
        if step == 3:
            raise OSError("cannot be read")
        return read(self, step)

    def failing(self: TrainStep, step: int, *more: Any) -> Any:
        if step == 3:
            raise ValueError("the layer broke")
        return call(self, step, *more)

    for target, name, fake in ((Loader, "step", unreadable), (TrainStep, "__call__", failing)):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, fake)
            loops = [loop_of(tmp_path, n, "run.steps=5", "checkpoint.every=2", *QUIET) for n in (0, 1)]
            messages = []
            for loop in loops:
                with pytest.raises((DataError, ValueError)) as raised:
                    loop.run()
                messages.append(str(raised.value))
            assert messages[0] == messages[1] and [loop.progress.step for loop in loops] == [3, 3]
        assert record(tmp_path, 0) == record(tmp_path, 1)
        assert [row["step"] for row in rows(tmp_path / "ahead_1")] == [1, 2, 3]


class LocalReads(TorchDispatchMode):
    """Counts tensors that become Python numbers."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_between_the_launches_of_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fp16 and clipping; the results of a step are read in one piece, after the launch of the next."""
    order: list[str] = []
    reads, call, values = LocalReads(), TrainStep.__call__, HostRead.values

    def launch(self: TrainStep, step: int, *more: Any) -> Any:
        with reads:
            found = call(self, step, *more)
        order.append(f"launch {step + 1}")
        return found

    def read(self: HostRead) -> list[float]:
        order.append(self.name)
        return values(self)

    loop = loop_of(tmp_path, 1, "run.steps=4", "precision.compute=fp16", *QUIET)
    loop.hooks.on_step.append(lambda row: order.append(f"row {row['step']}"))
    monkeypatch.setattr(TrainStep, "__call__", launch)
    monkeypatch.setattr(HostRead, "values", read)
    loop.run()
    expected = [STEP, STEP, "launch 1", "launch 2", STEP, "row 1", "launch 3", STEP, "row 2"]
    assert order == [*expected, "launch 4", STEP, "row 3", STEP, "row 4"]
    assert reads.count == 0


def batches() -> list[Microbatch]:
    def ids(first: int) -> torch.Tensor:
        return torch.arange(first, first + 6).view(2, 3)

    return [
        Microbatch(ids(0), ids(1), ids(2), ids(3), torch.tensor([8, 9])),
        Microbatch(ids(4), ids(5), ids(6), None, torch.tensor([10, 11]), step=1),
    ]


def test_the_microbatches_of_a_step_travel_in_one_transfer() -> None:
    allocated: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        allocated.append(size)
        return torch.empty(size, dtype=torch.uint8)

    given = batches()
    blocks: set[int] = set()

    def copy(tensors: Any) -> list[torch.Tensor]:
        found = packed_copy(tensors, torch.device("cpu"), allocate)
        blocks.update(x.untyped_storage().data_ptr() for x in found)
        return found

    moved = copy_microbatches(given, copy)
    assert len(allocated) == len(blocks) == 1 and allocated[0] % ALIGNMENT == 0
    for before, after in zip(given, moved, strict=True):
        assert (before.step, before.valid_tokens) == (after.step, after.valid_tokens)
        for name in ("tokens_BS", "labels_BS", "positions_BS", "documents_BS", "samples_B"):
            old, new = getattr(before, name), getattr(after, name)
            assert (old is None) == (new is None)
            assert old is None or (torch.equal(old, new) and old.dtype == new.dtype and old is not new)
    mixed = [torch.tensor([True, False, True]), torch.arange(5, dtype=torch.int32), torch.tensor(2.5), torch.empty(0)]
    assert all(map(torch.equal, packed_copy(mixed, torch.device("cpu"), allocate), mixed))
    on_cpu = copy_microbatches(given, list)
    assert all(before.tokens_BS is after.tokens_BS for before, after in zip(given, on_cpu, strict=True))


class Event:
    """An event that the device has not reached."""

    waited = reached = False

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waited = True


def test_results_are_read_after_their_event(monkeypatch: pytest.MonkeyPatch) -> None:
    event = Event()
    monkeypatch.setattr("megastack.training.host_reads.start_copy_to_host", lambda x: (x, event))
    read = HostRead(STEP, torch.tensor([1.0, 2.0]))
    assert not read.ready(0.0) and not event.waited
    event.reached = True
    assert read.ready(0.0) and not event.waited
    assert read.values() == [1.0, 2.0] and event.waited


def on_ranks(folder: str, ahead: int, layout: list[str]) -> tuple[object, ...]:
    loop = loop_of(Path(folder), ahead, fault("poison"), "run.steps=5", "run.on_nonfinite=skip", *QUIET, *layout)
    return outcome(loop.run())


@pytest.mark.parametrize(
    "layout",
    [
        "parallel.dp=2 parallel.zero.stage=1 optim=adamw",
        pytest.param("parallel.dp=2 parallel.zero.stage=3 optim=adamw", marks=pytest.mark.full),
        pytest.param("parallel.pp=2 model.layers=2 schedule.name=zb_h1", marks=pytest.mark.full),
    ],
)
def test_ranks_run_ahead_together(tmp_path: Path, layout: str) -> None:
    found = [run_ranks(on_ranks, 2, str(tmp_path), n, layout.split()) for n in (0, 1)]
    assert found[0] == found[1] and len(set(found[1])) == 1
    assert record(tmp_path, 0) == record(tmp_path, 1)
    assert math.isfinite(rows(tmp_path / "ahead_1")[-1]["loss"])
    assert_equal_checkpoints(tmp_path, 5)
