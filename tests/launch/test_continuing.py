"""What a run says when it goes on from a checkpoint: changed keys, and that nothing is left to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import megastack
from megastack.config.reading import to_yaml
from megastack.launch.continuing import resume_notes
from megastack.observe.folder import RunFolder
from tests.tiny_runs import events, overrides, rows, status, train

Told = Callable[..., list[str]]


@pytest.fixture
def told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Told:
    """The lines about changes and about nothing to train, of a run that has to end well."""

    def run(*more: str) -> list[str]:
        assert train(tmp_path, "checkpoint.at_end=true", *more) == 0
        return [line for line in capfd.readouterr().out.splitlines() if "changed since" in line or "nothing" in line]

    return run


AUTO = "resume=auto"


def test_changed_keys_are_listed_where_the_checkpoint_holds_them(tmp_path: Path, told: Told) -> None:
    """And not those of the run folder, which are of the last start."""
    assert told("run.steps=1") == []
    assert told("run.steps=2", AUTO) == []
    theta = ["changed since the checkpoint: model.rope.theta: 10000.0 -> 500000.0"]
    assert told("run.steps=3", AUTO, "model.rope.theta=5e5") == theta
    assert told("run.steps=4", AUTO, "model.rope.theta=5e5") == []
    both = ["model.norm_eps=1e-3", "optim.clip_norm=null", "parallel.dp=2"]
    path = RunFolder(tmp_path / "run").checkpoint(2)
    assert told("run.steps=3", f"resume={path}", "run.dir=null", *both) == [
        "changed since the checkpoint: model.norm_eps: 1e-05 -> 0.001",
        "changed since the checkpoint: optim.clip_norm: 1.0 -> null",
    ]


def test_an_older_checkpoint_is_compared_with_the_configuration_of_its_run(tmp_path: Path) -> None:
    config = megastack.compose([*overrides(tmp_path), "optim.lr=0.5", "run.steps=3"])
    checkpoint = RunFolder(tmp_path / "run").checkpoint(2)
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer.json").write_text('{"step": 2}')
    unknown = "the checkpoint does not hold its configuration: what changes is not known"
    assert resume_notes(config, checkpoint) == [f"resumes from {checkpoint}", unknown]
    before = megastack.compose([*overrides(tmp_path), "run.steps=2"])
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(before))
    assert resume_notes(config, checkpoint)[1:] == ["changed since the checkpoint: optim.lr: 0.1 -> 0.5"]


def test_a_checkpoint_at_or_beyond_the_last_step_is_told_at_both_ends(tmp_path: Path, told: Told) -> None:
    told("run.steps=2")
    before = rows(tmp_path / "run")
    for steps in (2, 1):
        line = f"nothing is trained: the checkpoint's step 2 is at or beyond run.steps={steps}"
        found = told(f"run.steps={steps}", AUTO)
        assert found[0] == f"{line}; use run.steps=3 or more"
        assert found[1].startswith(f"completed after step 2: {line}; everything is in ")
        assert (status(tmp_path / "run")["status"], status(tmp_path / "run")["reason"]) == ("completed", line)
        assert events(tmp_path / "run")[-1]["reason"] == line
    assert rows(tmp_path / "run") == before
    assert told("run.steps=3", AUTO) == [] and status(tmp_path / "run")["reason"] is None


def test_changes_of_the_model_are_told_of_weights_alone(tmp_path: Path, told: Told) -> None:
    told("run.steps=1")
    weights = [f"checkpoint.load_weights={RunFolder(tmp_path / 'run').checkpoint(1)}", f"run.dir={tmp_path}/new"]
    assert told("run.steps=1", *weights, "model.rope.theta=100", "optim.lr=0.5") == [
        "changed since checkpoint.load_weights: model.rope.theta: 10000.0 -> 100.0"
    ]
