"""Ranks with different inputs to a step: an error names the rank that differs, before anything is exchanged."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import megastack
from megastack.assemble.loop import build_loop
from megastack.assemble.training import build_training
from megastack.config.layout_rules import mesh_shape
from megastack.errors import DataError
from megastack.mesh.mesh import Mesh
from megastack.observe.folder import RunFolder
from megastack.testing.ranks import run_ranks
from megastack.training.signals import StopRequest
from tests.tiny_runs import overrides, rows


def train(folder: str, difference: str) -> tuple[str, tuple[int, ...], int]:
    """Three stages, the middle one of which is different from the second step on; the error on every rank."""
    config = megastack.compose([*overrides(Path(folder)), "parallel.pp=3", "model.layers=3", "batch.micro_size=2"])
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh)
    load = training.step.loader.step

    def changed(step: int) -> list:
        found = load(step)
        if mesh.rank != 1 or step == 0:
            return found
        if difference == "count":
            return found[:1]
        return [replace(m, tokens_BS=m.tokens_BS[:, :-1]) for m in found]

    training.step.loader.step = changed  # type: ignore[method-assign]
    place = RunFolder(Path(folder) / "run")
    if mesh.rank == 0:
        place.path.mkdir()
    loop = build_loop(training, place, StopRequest())
    with pytest.raises(DataError) as raised:
        loop.run()
    return str(raised.value), raised.value.ranks, len(mesh.flight_recorder.actions)


@pytest.mark.parametrize(("difference", "brought"), [("count", "1 × [2, 16]"), ("shape", "2 × [2, 15]")])
def test_the_odd_rank_is_named_on_all_before_the_step(difference: str, brought: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(train, 3, folder, difference)
    assert len({message for message, *_ in results}) == 1
    message, ranks, _ = results[0]
    assert ranks == (1,)
    assert message.startswith(f"rank 1 (pp1 dp0 tp0): step 2: microbatches {brought}, ")
    assert "the other ranks: step 2: microbatches 2 × [2, 16]" in message


FAR = 70_001
"""Tokens of a file, so many that its last ones are not looked at before training."""


def fail(folder: str, layout: list[str], at_the_end: bool) -> tuple[str, tuple[int, ...], int, int]:
    """Train on a file with an id outside the vocabulary; the error, the ranks, and the step that should have met it."""
    choices = [*overrides(Path(folder)), f"data.paths=[{folder}/far.npy]", "data.source=bin", "batch.global_size=12"]
    more = ["data.validation_fraction=0", "checkpoint.every=1", "checkpoint.at_end=false", "run.steps=400"]
    config = megastack.compose([*choices, *more, *layout])
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh)
    order = training.step.loader.order.many(np.arange(FAR // 16))
    step = int(np.flatnonzero(order == (FAR - 1) // 16 - 1)[0]) // 12
    training.progress.step = step - 1
    place = RunFolder(Path(folder) / "run")
    place.path.mkdir(exist_ok=True)
    loop = build_loop(training, place, StopRequest())
    if at_the_end:
        loop.options = replace(loop.options, steps=step)
        return loop.run().status, (), step, loop.progress.step
    with pytest.raises(DataError) as raised:
        loop.run()
    return str(raised.value), raised.value.ranks, step, loop.progress.step


@pytest.fixture
def far(tmp_path: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, 256, FAR)
    ids[-8:] = 999
    np.save(tmp_path / "far.npy", ids)
    return tmp_path


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("parallel.dp=1", 1),
        ("parallel.dp=2", 1),
        ("parallel.dp=3", 1),
        ("parallel.pp=2 parallel.dp=2", 2),
        ("parallel.tp=2", 2),
    ],
)
def test_an_id_that_some_ranks_meet_is_named_on_all_with_those_ranks(far: Path, layout: str, ranks: int) -> None:
    """What was trained before it is in the metrics and in a checkpoint; no healthy rank is blamed."""
    world = int(np.prod([int(choice.partition("=")[2]) for choice in layout.split()]))
    results = run_ranks(fail, world, str(far), layout.split(), False)
    assert len({(message, found) for message, found, *_ in results}) == 1
    message, found, step, done = results[0]
    assert len(found) == ranks and message.startswith(f"rank {found[0]} (pp0 dp")
    more = " and 1 other rank" if ranks > 1 else ""
    assert f"){more}: step {step + 1}: token id 999 in sample 4374 at position " in message
    assert message.endswith(": outside model.vocab=256; use ids from 0 to 255, or a larger model.vocab")
    assert done == step and [row["step"] for row in rows(far / "run")] == [step]
    assert RunFolder(far / "run").checkpoint(step).is_dir()


def test_an_id_in_a_step_that_never_comes_fails_nothing(far: Path) -> None:
    results = run_ranks(fail, 2, str(far), ["parallel.dp=2"], True)
    assert [(status, done - step) for status, _, step, done in results] == [("completed", 0)] * 2


def broken_reading(folder: str) -> tuple[str, tuple[int, ...], str]:
    """One rank of three cannot read its file from the second step on; the error of each, and what led to it."""
    config = megastack.compose([*overrides(Path(folder)), "parallel.dp=3", "batch.global_size=3"])
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh)
    load = training.step.loader.step

    def read(step: int) -> list:
        if mesh.rank == 2 and step:
            raise OSError(5, "Input/output error", "text.bin")
        return load(step)

    training.step.loader.step = read  # type: ignore[method-assign]
    place = RunFolder(Path(folder) / "run")
    if mesh.rank == 0:
        place.path.mkdir()
    loop = build_loop(training, place, StopRequest())
    with pytest.raises(DataError) as raised:
        loop.run()
    return str(raised.value), raised.value.ranks, type(raised.value.__cause__).__name__


def test_a_file_that_one_rank_cannot_read_is_reported_by_all_with_its_message(tmp_path: Path) -> None:
    results = run_ranks(broken_reading, 3, str(tmp_path))
    text = "rank 2 (pp0 dp2 tp0): step 2: OSError: [Errno 5] Input/output error: 'text.bin'"
    assert results == [(text, (2,), "NoneType")] * 2 + [(text, (2,), "OSError")]
