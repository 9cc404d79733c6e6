"""Two runs never write into one folder, and a start that is rejected leaves everything as it was."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import megastack
from megastack.launch import local, preflight
from megastack.launch.environment import job
from megastack.observe import ownership
from megastack.observe.claims import claim_path, newest_claim
from megastack.observe.process import Process
from megastack.training.hooks import Hooks
from tests.faulty_mlp import fault
from tests.launch.test_external import join, torchrun
from tests.observe.test_ownership import owned_by
from tests.tiny_runs import overrides, status, text, train

fork = multiprocessing.get_context("fork")


@pytest.fixture
def other() -> Iterator[Process]:
    """A living process beside this one."""
    sleeper = fork.Process(target=time.sleep, args=(600,))
    sleeper.start()
    assert sleeper.pid is not None
    yield Process._of(sleeper.pid)
    sleeper.kill()
    sleeper.join()


def contents(folder: Path) -> dict[str, object]:
    """Every file with its content and time, every folder."""
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("resume", ["auto", "last"])
def test_a_folder_in_use_is_one_line_of_the_report(
    tmp_path: Path, other: Process, resume: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """With what else is wrong; host, process and start time; under torchrun told once, by all ranks."""
    assert train(tmp_path, "run.steps=1", "checkpoint.at_end=true") == 0
    owned_by(tmp_path / "run", other, number=2)
    capfd.readouterr()
    before = contents(tmp_path / "run")
    again = ("run.steps=2", f"resume={resume}", *(("run.dir=null",) if resume == "last" else ()))
    assert train(tmp_path, *again, "optim.freeze=[nothing]") == 78
    report = capfd.readouterr().err.splitlines()
    key = f"run.dir={tmp_path}/run: " if resume == "auto" else f"resume=last: the newest run {tmp_path}/run "
    [line] = [line for line in report if "in use" in line]
    assert line.startswith(f"{key}is in use by process {other.pid} on host {other.host}, started 20")
    assert len(report) == 2, report
    assert "optim.freeze=nothing" in "".join(report)
    assert contents(tmp_path / "run") == before
    assert join(tmp_path, torchrun, 2, "parallel.dp=2", *again) == [78, 78]
    assert capfd.readouterr().err.count("is in use by") == 1
    assert contents(tmp_path / "run") == before


def test_runs_in_one_process_one_after_the_other_release_their_folder(tmp_path: Path) -> None:
    config = megastack.compose([*overrides(tmp_path), "resume=auto", "run.steps=1"])
    for expected in (1, 2, 3):
        assert megastack.train(config).status == "completed"
        claim = newest_claim(tmp_path / "run")
        assert (claim.number, claim.released) == (expected, True)


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("kill", 1), ("term", 75)])
def test_every_end_releases_the_folder(tmp_path: Path, how: str, code: int) -> None:
    assert train(tmp_path, "resume=auto", fault(how)) == code
    assert newest_claim(tmp_path / "run").released


def _hold(folder: Path, ready: object) -> None:
    config = megastack.compose([*overrides(folder), "resume=auto", "run.steps=100000", "checkpoint.every=2"])
    megastack.train(config, hooks=Hooks(on_checkpoint=[lambda *_: ready.set()]))  # type: ignore[attr-defined]


def test_a_live_run_keeps_others_out_until_it_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text(tmp_path)
    ready = fork.Event()
    first = fork.Process(target=_hold, args=(tmp_path, ready))
    first.start()
    assert ready.wait(120)
    assert train(tmp_path, "resume=auto", "run.steps=1") == 78
    assert f"is in use by process {first.pid} on host" in capfd.readouterr().err
    first.kill()
    first.join()
    assert status(tmp_path / "run")["status"] == "running"
    began = time.monotonic()
    assert train(tmp_path, "resume=auto", "run.steps=1") == 0
    assert time.monotonic() - began < ownership.LIMIT_S
    assert newest_claim(tmp_path / "run").number == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_lost_its_folder_stops_before_it_publishes(
    tmp_path: Path, other: Process, asynchronous: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """As after a pause in which its heartbeat was missed; the later owner's records stay as they are."""
    run = tmp_path / "run"

    def lose(row: object) -> None:
        if row["step"] == 3:  # type: ignore[index]
            owned_by(run, other, number=2)
            claim_path(run, 1).unlink()
            (run / "status.json").write_text('{"status": "running", "reason": "the later owner"}')

    config = megastack.compose(
        [
            *overrides(tmp_path),
            "resume=auto",
            "run.steps=9",
            "checkpoint.every=2",
            f"checkpoint.asynchronous={asynchronous}",
        ]
    )
    result = megastack.train(config, hooks=Hooks(on_step=[lose]))
    assert result.status == "failed" and f"was taken over by process {other.pid} on" in str(result.reason)
    assert f"was taken over by process {other.pid}" in capfd.readouterr().err
    published = {path.name for path in (run / "checkpoints").glob("step_*")}
    assert published <= {"step_00000002"} and (published or asynchronous)
    assert json.loads((run / "status.json").read_text())["reason"] == "the later owner"
    assert not (run / "failures").exists() and not newest_claim(run).released


@pytest.mark.parametrize("what", ["_describe", "write_status"])
@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_cannot_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], what: str, there: bool
) -> None:
    whole = getattr(preflight, what)

    def full(*given: object, **more: object) -> None:
        whole(*given, **more)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preflight, what, full)
    text(tmp_path)
    if there:
        (tmp_path / "run").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for more in ((), ("resume=auto",), ("-m", "seed=1,2")):
        assert train(tmp_path, *more) == 78
        assert sorted(tmp_path.rglob("*")) == before
    assert "No space left on device" in capfd.readouterr().err


def test_a_sweep_leaves_no_marks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(tmp_path, "-m", "seed=1,2", "run.steps=1") == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["1", "2"]


def test_an_error_of_the_launcher_does_not_leave_a_run_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "agent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        megastack.train(megastack.compose(overrides(tmp_path)))
    assert status(tmp_path / "run")["status"] == "failed"
    assert newest_claim(tmp_path / "run").released


def test_what_counts_as_the_same_job() -> None:
    torchrun_job = {"TORCHELASTIC_RUN_ID": "job17"}
    assert job({}) == job({"RANK": "0", "WORLD_SIZE": "1"}) and job({}).group is None
    assert job(torchrun_job) == job(torchrun_job) != job({"TORCHELASTIC_RUN_ID": "job18"})
    unnamed = job({"TORCHELASTIC_RUN_ID": "none"}).group
    assert unnamed is not None and str(os.getppid()) in unnamed  # of this agent alone
    first, requeued = ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": count} for count in ("0", "1"))
    assert job(requeued).supersedes(job(first)) and not job(first).supersedes(job(requeued))
    assert not job(first).supersedes(job(first))
