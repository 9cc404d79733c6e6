"""Starts of an elastic job on unlike numbers of ranks; the ranks are forked here, with what torchrun would have set."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from megastack.checkpoint.reader import CheckpointReader
from megastack.config.compose import compose
from megastack.errors import MegastackError
from megastack.launch.restarts import Guard, note_start, read_starts
from megastack.observe.folder import RunFolder
from megastack.observe.status import write_status
from tests.faulty_mlp import fault
from tests.launch.test_external import join, slurm, torchrun
from tests.tiny_runs import events, losses, overrides, rows, status, train

ELASTIC = ("launch.elastic=true", "resume=auto")
ADAM = ("optim=adamw", "lr=cosine", "lr.total_steps=9", "lr.warmup_steps=2", "model.dropout=0.1", "checkpoint.every=2")


def starts(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_a_job_goes_on_with_fewer_and_with_more_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A rank is killed on 4 + 1 ranks, one asks to stop on 3, the job ends on 4; all as one straight run."""
    more = (*ELASTIC, *ADAM, "parallel.tp=2", "run.steps=9", "checkpoint.at_end=true", "launch.grace_s=5")
    straight_run = (*ADAM, "parallel.tp=2", "run.steps=9", "checkpoint.at_end=true")
    assert train(tmp_path, *straight_run, f"run.dir={tmp_path}/straight") == 0
    capfd.readouterr()
    assert 0 not in join(tmp_path, torchrun, 5, *more, fault("kill", at=4))
    assert join(tmp_path, torchrun, 3, *more, fault("term", at=6)) == [75, 75, 75]
    assert join(tmp_path, torchrun, 4, *more) == [0, 0, 0, 0]

    run, straight = tmp_path / "run", tmp_path / "straight"
    assert [start["dp"] for start in starts(run)] == [2, 1, 2]
    assert [start["step"] for start in starts(run)] == [0, 4, 7]
    assert [start["accumulation"] for start in starts(run)] == [2, 4, 2]
    screen = capfd.readouterr().out
    assert "elastic start: 5 ranks, dp 2, gradient accumulation 2; 1 rank from 4 on left over, which wait" in screen
    assert (
        "restart 1: 3 ranks, dp 2 → 1, gradient accumulation 2 → 4; 1 rank from 2 on left over, which wait; "
        "goes on after step 4 (before it: failed, rank 3 ended without a word)"
    ) in screen
    told = "restart 2: 4 ranks, dp 1 → 2, gradient accumulation 4 → 2; goes on after step 7 (before it: preempted"
    assert told in screen and told in (run / "logs" / "rank_00003.log").read_text()
    assert str(status(run)["start"]).startswith(told)
    ended = status(run)
    assert (ended["status"], ended["step"], ended["exit_code"], ended["rank"]) == ("completed", 9, 0, None)
    names = [event["name"] for event in events(run) if event["name"] != "checkpoint"]
    assert names == ["start", "restart", "resume", "preempt", "end", "restart", "resume", "end"]
    [_, second] = [event for event in events(run) if event["name"] == "restart"]
    assert (second["dp_before"], second["dp"], second["started"], second["ranks"]) == (1, 2, 4, 4)

    assert [row["step"] for row in rows(run)] == list(range(1, 10))
    assert losses(run) == pytest.approx(losses(straight), rel=1e-10)
    for name in ("lr", "tokens", "consumed_tokens", "consumed_samples"):
        assert [row[name] for row in rows(run)] == [row[name] for row in rows(straight)]
    ends = [CheckpointReader(folder / "checkpoints" / "step_00000009") for folder in (run, straight)]
    for name in ends[0].names:
        expected = ends[1].read(name)
        assert torch.allclose(ends[0].read(name), expected, rtol=0, atol=1e-10 * max(1e-3, float(expected.abs().max())))


@pytest.mark.full
def test_a_start_that_failed_before_any_checkpoint_begins_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the same folder, bitwise like a run of its own; the account of the first start is not told by the second."""
    more = (*ELASTIC, "run.steps=3", "checkpoint.at_end=true")
    assert join(tmp_path, slurm, 2, *more, fault("raise")) == [1, 1]
    assert "checkpoint.every=null: a rank that fails takes the run back to step 0" in capfd.readouterr().out
    assert join(tmp_path, slurm, 2, *more, fault("kill"))[1] == -9
    captured = capfd.readouterr()
    assert "(before it: failed [rank 1 | pp0 dp1 tp0] ValueError: the layer broke)" in captured.out
    assert "the layer broke" not in captured.err
    assert status(tmp_path / "run")["reason"] != "ValueError: the layer broke"
    assert join(tmp_path, slurm, 2, *more) == [0, 0]
    assert "failed, rank 1 ended without a word" in capfd.readouterr().out
    assert train(tmp_path, "parallel.dp=2", "run.steps=3", f"run.dir={tmp_path}/straight") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert [path.name for path in (tmp_path / "run" / "failures").iterdir()].count("restart_1") == 1


def test_spare_ranks_share_a_refusal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Told once; and what no degree can help with names the numbers on the first rank."""
    assert join(tmp_path, torchrun, 3, *ELASTIC, "parallel.tp=2", "data.paths=[none.jsonl]") == [78, 78, 78]
    assert capfd.readouterr().err.count("none.jsonl") == 1
    assert join(tmp_path, torchrun, 1, *ELASTIC, "parallel.tp=2") == [78]
    assert "the 1 rank of this start cannot hold pp·cp·tp = 2" in capfd.readouterr().err


def test_without_the_key_another_world_stays_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert join(tmp_path, torchrun, 1, "parallel.dp=2", "resume=auto") == [78]
    assert "parallel.dp=2: pp·dp·cp·tp = 2 must be the world of 1 rank" in capfd.readouterr().err


def test_starts_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    good = {"restart": 0, "nodes": None, "started": 2, "ranks": 2, "dp": 1, "accumulation": 4, "step": 0, "after": None}
    wrong = [b"", b"{", b"[" * 100_000, b"[]", b"\xff", *(json.dumps(good | {name: "1"}).encode() for name in good)]
    wrong.remove(json.dumps(good | {"after": "1"}).encode())
    folder.starts.write_bytes(b"\n".join([*wrong, json.dumps(good | {"time": 1.0}).encode(), b'{"restart": 1']))
    assert [start.started for start in read_starts(folder)] == [2]


def test_a_start_ends_when_a_later_one_has_the_folder(tmp_path: Path) -> None:
    config = compose([*overrides(tmp_path), *ELASTIC, "parallel.dp=1"])
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    write_status(folder.status, "running")
    facts = {"nodes": 1, "started": 1, "step": 0, "after": None}
    note_start(config, folder.path, **facts)
    first = Guard(folder)
    first({"step": 1})
    start, _ = note_start(config, folder.path, **facts)
    second = Guard(RunFolder(folder.path, start.restart))
    with pytest.raises(
        MegastackError, match=r"a later start of this job has the run folder; this one ends after step 2"
    ):
        first({"step": 2})
    second({"step": 2})
    assert os.path.commonpath([folder.failures, RunFolder(folder.path, 1).failures]) == str(folder.failures)
