"""Steps, validations and files without a valid label: they train nothing and do not end a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megastack.assemble.data import read_dataset
from megastack.assemble.loop import build_loop
from megastack.assemble.training import Training, build_training
from megastack.checkpoint.reader import CheckpointReader
from megastack.cli import main
from megastack.config.schema import TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.observe.folder import RunFolder
from megastack.testing.compare import TOLERANCES, differences
from megastack.testing.training import composed, trace_layout
from megastack.training.signals import StopRequest
from megastack.training.state import Hooks, RunResult
from tests.data.token_cases import write_by_hand
from tests.tiny_runs import events, overrides, rows, status

STEPS = 6
EMPTY = [3, 5]
"""The 1-based steps whose global batch has no valid label, asserted below."""


def config_of(folder: Path, *more: str) -> TrainConfig:
    """A tiny run on a file in which most samples are documents of one token."""
    if not (folder / "sparse.idx").exists():
        rng = np.random.default_rng(4)
        lengths = [length for _ in range(12) for length in [24, *[1] * 46]]
        write_by_hand(folder / "sparse", [rng.integers(0, 256, length).tolist() for length in lengths], 8)
    data = [f"data.paths=[{folder}/sparse]", "data.source=bin", "data.validation_fraction=0", "batch.global_size=2"]
    moments = ["optim.name=adamw", "optim.lr=0.01", "lr.schedule=linear", "lr.warmup_steps=1", "lr.total_steps=9"]
    return composed(overrides(folder), data, moments, f"run.steps={STEPS}", *more)


def run(config: TrainConfig, place: Path, resume: Path | None = None, hooks: Hooks | None = None) -> RunResult:
    place.mkdir(exist_ok=True)
    training = build_training(config, Mesh.single(), read_dataset(config))
    if resume is not None:
        training.restore(resume)
    return build_loop(training, RunFolder(place), StopRequest(), hooks, resume).run()


def counts(training: Training) -> list[int]:
    return [training.step.loader.global_valid_tokens(step) for step in range(STEPS)]


def test_a_step_without_a_label_is_skipped_counted_and_reported(tmp_path: Path) -> None:
    """Weights, moments and their count stay; the data, the learning rate and the run continue."""
    reported: list[float | None] = []
    config = config_of(tmp_path, "checkpoint.every=1", "observe.tensorboard=null")
    tokens = counts(build_training(config, Mesh.single()))
    assert [step + 1 for step, count in enumerate(tokens) if not count] == EMPTY
    result = run(config, tmp_path / "run", hooks=Hooks([lambda row: reported.append(row["loss"])]))
    found = rows(tmp_path / "run")
    assert (result.status, result.exit_code, result.loss) == ("completed", 0, found[-1]["loss"])
    assert [row["step"] for row in found if row["loss"] is None] == EMPTY
    assert reported == [row["loss"] for row in found]
    assert all((row["loss"] is None) == (row["grad_norm"] is None) == (row["tokens"] == 0) for row in found)
    assert [row["tokens"] for row in found] == tokens
    assert [row["skipped"] for row in found] == [0, 0, 1, 1, 2, 2]
    assert [row["consumed_samples"] for row in found] == [2, 4, 6, 8, 10, 12]
    assert [row["consumed_tokens"] for row in found] == np.cumsum(tokens).tolist()
    rate = build_training(config, Mesh.single()).step.learning_rate
    assert [row["lr"] for row in found] == [rate.at(step) for step in range(STEPS)]
    assert [event["step"] for event in events(tmp_path / "run") if event["name"] == "no_labels"] == EMPTY
    for step in EMPTY:
        before, after = (CheckpointReader(RunFolder(tmp_path / "run").checkpoint(at)) for at in (step - 1, step))
        assert set(before.names) == set(after.names) and "optim/step" in before.names
        assert all(torch.equal(before.read(name), after.read(name)) for name in before.names)
    end = CheckpointReader(RunFolder(tmp_path / "run").checkpoint(STEPS))
    assert int(end.read("optim/step")) == STEPS - len(EMPTY)


def test_a_resume_before_at_and_after_such_a_step_is_the_straight_run(tmp_path: Path) -> None:
    straight = config_of(tmp_path, "checkpoint.every=1", "model.dropout=0.1")
    run(straight, tmp_path / "straight")
    expected, end = rows(tmp_path / "straight"), RunFolder(tmp_path / "straight").checkpoint(STEPS)
    for step in (2, 3, 4):
        place = tmp_path / f"from_{step}"
        run(straight, place, RunFolder(tmp_path / "straight").checkpoint(step))
        for key in ("step", "loss", "grad_norm", "lr", "tokens", "consumed_tokens", "consumed_samples", "skipped"):
            assert [row[key] for row in rows(place)] == [row[key] for row in expected[step:]], key
        ends = [CheckpointReader(path) for path in (end, RunFolder(place).checkpoint(STEPS))]
        assert all(torch.equal(ends[0].read(name), ends[1].read(name)) for name in ends[0].names)


@pytest.mark.parametrize(
    "layout",
    [
        "parallel.dp=2",
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.dp=2 parallel.zero.stage=1",
        "parallel.dp=2 parallel.zero.stage=2",
        "parallel.dp=2 parallel.zero.stage=3",
        "parallel.pp=2 schedule.name=zb_h1",
    ],
)
def test_every_layout_skips_the_same_steps_and_agrees_in_the_others(tmp_path: Path, layout: str) -> None:
    """Among the others are steps in which one data-parallel rank has no valid label."""
    training = build_training(config_of(tmp_path), Mesh.single())
    halves = [[part.valid_tokens for part in training.step.loader.step(step)] for step in range(STEPS)]
    assert any(sum(half) and not all(half) for half in halves)
    reference = trace_layout(config_of(tmp_path), STEPS)
    assert [step + 1 for step, found in enumerate(reference.gradients) if not found] == EMPTY
    other = trace_layout(config_of(tmp_path, *layout.split()), STEPS)
    assert differences(reference, other, tolerance=TOLERANCES[torch.float64]) == []


def test_a_dynamic_loss_scale_does_not_count_such_a_step(tmp_path: Path) -> None:
    training = build_training(config_of(tmp_path, "precision.compute=fp16"), Mesh.single())
    scale = training.step.loss_scale
    for step in range(EMPTY[0] - 1):
        training.step(step)
    before = {name: x.clone() for name, x in scale.state().items()}
    outcome = training.step(EMPTY[0] - 1)
    assert outcome.loss is None and outcome.loss_scale is not None
    assert before and all(torch.equal(before[name], x) for name, x in scale.state().items())


def test_a_run_of_the_command_line_continues_across_such_steps_on_several_ranks(tmp_path: Path) -> None:
    config_of(tmp_path)
    data = [f"data.paths=[{tmp_path}/sparse]", "data.source=bin", "data.validation_fraction=0", "batch.global_size=2"]
    choices = [*overrides(tmp_path), *data, f"run.steps={STEPS}", "parallel.dp=2", "observe.dump_steps=[2,3]"]
    assert main(["train", *choices]) == 0
    assert [row["step"] for row in rows(tmp_path / "run") if row["loss"] is None] == EMPTY
    assert status(tmp_path / "run")["step"] == STEPS
    dumps = [load_file(tmp_path / "run" / "dump" / f"step_{step}.safetensors") for step in (2, 3)]
    weights = {name for name in dumps[0] if name.startswith("weights/")}
    assert set(dumps[1]) == weights < set(dumps[0])
    assert all(torch.equal(dumps[0][name], dumps[1][name]) for name in weights)


def test_a_validation_without_a_label_has_no_loss(tmp_path: Path) -> None:
    """The split, or what is chosen of it; the file's last part is held out, and that is documents of one token."""
    reported: list[float | None] = []
    documents = [[7] * 40 for _ in range(20)] + [[7]] * 50
    write_by_hand(tmp_path / "tail", documents, 8)
    held = ["data.validation_fraction=0.05", f"data.paths=[{tmp_path}/tail]", "run.validate_every=2"]
    config = config_of(tmp_path, *held, "run.steps=3")
    assert not build_training(config, Mesh.single()).validation.valid_tokens
    hooks = Hooks(on_validation=[lambda row: reported.append(row["loss"])])
    assert run(config, tmp_path / "run", hooks=hooks).status == "completed"
    found = rows(tmp_path / "run", "validation")
    assert [(row["step"], row["loss"], row["tokens"]) for row in found] == [(2, None, 0), (3, None, 0)]
    assert reported == [None, None] and all(row["samples"] > 0 for row in found)


def test_evaluating_such_a_split_or_file_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_by_hand(tmp_path / "tail", [[7] * 40 for _ in range(20)] + [[7]] * 50, 8)
    held = [f"data.paths=[{tmp_path}/tail]", "data.source=bin", "data.validation_fraction=0.05", "run.steps=1"]
    assert main(["train", *overrides(tmp_path), *held, "checkpoint.at_end=true"]) == 0
    assert main(["evaluate", str(tmp_path / "run")]) == 78
    assert "the validation split of the run has no token to predict; use --file" in capsys.readouterr().err
    (tmp_path / "one.txt").write_text("a")
    assert main(["evaluate", str(tmp_path / "run"), "--file", str(tmp_path / "one.txt")]) == 78
    assert "has no token to predict; use a text of at least two tokens" in capsys.readouterr().err
