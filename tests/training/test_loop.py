"""The loop on one rank of this process: when it validates, saves, dumps, stops, and what a resume continues."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import megastack
from megastack.assemble.data import read_dataset
from megastack.assemble.loop import build_loop
from megastack.assemble.training import build_training
from megastack.batch import Microbatch
from megastack.checkpoint.reader import CheckpointReader
from megastack.data.loader import Loader
from megastack.mesh.mesh import Mesh
from megastack.observe.folder import RunFolder
from megastack.training.signals import StopRequest
from megastack.training.state import Hooks, RunResult
from tests.faulty_mlp import fault
from tests.tiny_runs import events, losses, overrides, rows, status, train


@pytest.fixture(autouse=True, params=[0, pytest.param(1, marks=pytest.mark.full)], ids=["", "ahead"])
def steps_ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test also passes where the loop launches a step before it reads the results of the previous one."""
    monkeypatch.setattr("megastack.training.loop.default_steps_ahead", lambda device: request.param)


def run(
    folder: Path, *more: str, resume: Path | None = None, hooks: Hooks | None = None, name: str = "run"
) -> RunResult:
    """Train on a mesh of one rank in this process."""
    config = megastack.compose([*overrides(folder), *more])
    place = RunFolder(folder / name)
    place.path.mkdir(exist_ok=True)
    training = build_training(config, Mesh.single(), read_dataset(config))
    if resume is not None:
        training.restore(resume)
    return build_loop(training, place, StopRequest(config.run.time_limit_s), hooks, resume).run()


def test_validation_changes_nothing_and_ignores_dropout_smoothing_and_z_loss(tmp_path):
    """Training losses are equal with and without it; its own loss is the plain cross-entropy."""
    noise = ("model.dropout=0.5", "loss.label_smoothing=0.3", "loss.z_loss=0.1", "run.steps=4")
    run(tmp_path, *noise, "run.validate_every=1", name="often")
    run(tmp_path, *noise, "run.validate_every=0", "run.validate_samples=5", name="once")
    assert losses(tmp_path / "often") == losses(tmp_path / "once")
    assert [row["step"] for row in rows(tmp_path / "often", "validation")] == [1, 2, 3, 4]
    assert [row["samples"] for row in rows(tmp_path / "once", "validation")] == [5]
    still = ("optim.lr=0", "run.steps=1")
    run(tmp_path, *still, name="plain")
    run(tmp_path, *still, *noise[:3], name="noisy")
    plain, noisy = (rows(tmp_path / name, "validation")[0] for name in ("plain", "noisy"))
    assert plain["loss"] == noisy["loss"] and plain["samples"] == noisy["samples"] > 20
    assert losses(tmp_path / "plain") != losses(tmp_path / "noisy")


@pytest.mark.parametrize("steps", [1, 3])
def test_reading_data_never_takes_more_than_all_of_the_time(tmp_path, monkeypatch, capsys, steps):
    read = Loader.step

    def slowly(self: Loader, step: int) -> list[Microbatch]:
        time.sleep(0.3)
        return read(self, step)

    monkeypatch.setattr(Loader, "step", slowly)
    run(tmp_path, f"run.steps={steps}", "run.validate_every=0", "data.validation_fraction=0")
    end = events(tmp_path / "run")[-1]
    assert 0.3 * steps <= end["data_s"] < end["train_s"]
    (share,) = re.findall(r"reading data took .* s of training \((.*)%\)", capsys.readouterr().out)
    assert 0 < float(share) <= 100


def test_resumes_within_an_epoch_and_at_its_end_equal_the_straight_run(tmp_path):
    """Six steps are an epoch; resumed after two, four and six: no sample twice, none left out, the same losses."""
    (tmp_path / "short.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(24)))
    data = (f"data.paths=[{tmp_path}/short.jsonl]", "data.pack=false", "data.validation_fraction=0")
    choices = (*data, "optim=adamw", "lr=cosine", "lr.total_steps=9", "lr.warmup_steps=3", "checkpoint.at_end=true")
    run(tmp_path, *choices, "run.steps=9", name="straight")
    resume = None
    for steps in (2, 4, 6, 9):
        result = run(tmp_path, *choices, f"run.steps={steps}", resume=resume)
        resume = RunFolder(tmp_path / "run").checkpoint(steps)
        assert result.step == steps and status(tmp_path / "run")["checkpoint"] == str(resume)
    straight, resumed = (rows(tmp_path / name) for name in ("straight", "run"))
    for key in ("loss", "lr", "grad_norm", "tokens", "consumed_tokens", "consumed_samples"):
        assert [row[key] for row in straight] == [row[key] for row in resumed], key
    ends = [CheckpointReader(RunFolder(tmp_path / name).checkpoint(9)) for name in ("straight", "run")]
    assert all(torch.equal(ends[0].read(name), ends[1].read(name)) for name in ends[0].names)

    config = megastack.compose([*overrides(tmp_path), *choices])
    loader = build_training(config, Mesh.single(), read_dataset(config)).step.loader
    seen = [[int(n) for step in epoch for n in loader.sample_numbers(step)] for epoch in (range(6), range(6, 12))]
    assert all(sorted(epoch) == list(range(24)) for epoch in seen) and seen[0] != seen[1]


def test_a_non_finite_step_ends_the_run_before_it_updates(tmp_path):
    """The step is not counted and its update is left out; what was saved stays."""
    nan = fault("poison")
    result = run(tmp_path, nan, "run.steps=5", "checkpoint.every=1", "observe.dump_steps=[2,3]")
    assert (result.status, result.exit_code, result.step) == ("diverged", 1, 2)
    ended, dump = status(tmp_path / "run"), tmp_path / "run" / "dump"
    assert (ended["status"], ended["exit_code"], ended["step"]) == ("diverged", 1, 2)
    assert ended["checkpoint"].endswith("step_00000002") and "step 3" in ended["reason"]
    before, after = (load_file(dump / f"step_{step}.safetensors") for step in (2, 3))
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("weights/"))
    assert any(x.isnan().any() for name, x in after.items() if name.startswith("gradients/"))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert [event["name"] for event in events(tmp_path / "run")][-2:] == ["nonfinite", "end"]


def test_a_non_finite_step_can_be_skipped_and_is_counted(tmp_path):
    """Its event names the origin, and locating it adds no bytes to the row of the step."""
    more = ("run.on_nonfinite=skip", "observe.dump_steps=[2,3,5]", "parallel.dp=2")
    assert train(tmp_path, fault("poison"), "run.steps=5", *more) == 0
    found, dump = rows(tmp_path / "run"), tmp_path / "run" / "dump"
    [event] = [event for event in events(tmp_path / "run") if event["name"] == "nonfinite"]
    where = "on rank 1 (pp0 dp1 tp0): first in the output of blocks.0.mlp, microbatch 0; first gradient "
    assert event["origin"].startswith(where) and (event["rank"], event["coordinates"]) == (1, "pp0 dp1 tp0")
    assert (event["step"], event["loss"], found[2]["wire_bytes"]) == (3, "nan", found[3]["wire_bytes"])
    assert [row["skipped"] for row in found] == [0, 0, 1, 1, 1]
    assert found[2]["loss"] is None and found[2]["grad_norm"] is None and found[3]["loss"] > 0
    before, after, end = (load_file(dump / f"step_{step}.safetensors") for step in (2, 3, 5))
    weights = [name for name in before if name.startswith("weights/")]
    assert all(torch.equal(before[name], after[name]) for name in weights)
    assert not all(torch.equal(end[name], after[name]) for name in weights)


def test_dumps_hold_gradients_before_clipping_and_weights_after_the_update(tmp_path):
    run(tmp_path, "run.steps=2", "optim.clip_norm=0.01", "optim.weight_decay=0", "observe.dump_steps=[1,2]")
    first, second = (load_file(tmp_path / "run" / "dump" / f"step_{step}.safetensors") for step in (1, 2))
    row = rows(tmp_path / "run")[1]
    gradients = {name.partition("/")[2]: x for name, x in second.items() if name.startswith("gradients/")}
    norm = float(torch.stack([x.square().sum() for x in gradients.values()]).sum().sqrt())
    assert norm == pytest.approx(row["grad_norm"], rel=1e-12) and norm > 0.01
    for name, gradient in gradients.items():
        step = second[f"weights/{name}"] - first[f"weights/{name}"]
        torch.testing.assert_close(step, -row["lr"] * gradient * 0.01 / (norm + 1e-6), rtol=1e-9, atol=1e-14)


def test_when_to_save_and_what_hooks_receive(tmp_path):
    reported: list[tuple[str, int]] = []
    hooks = Hooks(
        [lambda row: reported.append(("step", row["step"]))],
        [lambda row: reported.append(("validation", row["step"]))],
        [lambda step, path: reported.append(("checkpoint", int(path.name[5:])))],
    )
    run(tmp_path, "run.steps=5", "checkpoint.every=2", "checkpoint.keep_last=1", "run.validate_every=4", hooks=hooks)
    assert reported == [
        *(("step", 1), ("step", 2), ("checkpoint", 2), ("step", 3), ("step", 4), ("validation", 4), ("checkpoint", 4)),
        *(("step", 5), ("validation", 5)),
    ]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000004"]


@pytest.mark.parametrize(("every", "saved"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3]), (4, [4]), (5, [])])
def test_every_n_steps_includes_the_last_step(tmp_path: Path, every: int, saved: list[int]) -> None:
    """Of checkpoints without checkpoint.at_end, and of lines on the console; the last step is validated in any case."""
    more = [f"checkpoint.every={every}", "checkpoint.at_end=false", f"run.validate_every={every}"]
    run(tmp_path, "run.steps=4", *more)
    found = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert found == [f"step_{step:08d}" for step in saved]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    scored = [row["step"] for row in map(json.loads, lines) if row["kind"] == "validation"]
    assert scored == sorted({*saved, 4})


def test_a_time_limit_before_the_first_step_saves_the_start(tmp_path):
    result = run(tmp_path, "run.time_limit_s=1e-9", "checkpoint.at_end=false")
    assert (result.status, result.step, result.exit_code, result.loss) == ("preempted", 0, 75, None)
    assert status(tmp_path / "run")["checkpoint"].endswith("step_00000000")
    straight = run(tmp_path, "run.steps=2", resume=RunFolder(tmp_path / "run").checkpoint(0), name="again")
    assert straight.step == 2
