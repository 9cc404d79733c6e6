"""`megastack train -m`: every job of the product with its own ranks and folder, and the exit code of the sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megastack.cli.sweep as sweep
import megastack.launch.local as local
from megastack.observe.folder import claim
from megastack.training.state import RunResult
from tests.tiny_runs import losses, text, train


@pytest.mark.full
def test_invalid_jobs_are_listed_and_the_rest_runs(tmp_path, capfd):
    """No state leaks from one job to the next: the first and the last have the same layout and the same losses."""
    table = tmp_path / "table.json"
    choices = ("-m", "parallel.tp=1,2,3,1", "model.dropout=0.1", "run.dir=null", "run.steps=3", "--json", str(table))
    assert train(tmp_path, *choices) == 78
    jobs = json.loads(table.read_text())
    assert [job["status"] for job in jobs] == ["completed", "completed", "refused", "completed"]
    assert [job["exit_code"] for job in jobs] == [0, 0, 78, 0]
    assert "parallel.tp=3: must divide" in jobs[2]["reason"] and jobs[2]["folder"] is None
    root = next((tmp_path / "multirun").glob("*/*"))
    assert sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != ".hydra") == ["1", "2", "4"]
    curves = {number: losses(root / number) for number in ("1", "2", "4")}
    assert curves["1"] == curves["4"]
    assert curves["2"] == pytest.approx(curves["1"], rel=1e-10)
    assert [job["loss"] for job in jobs if job["loss"]] == [curves[number][-1] for number in ("1", "2", "4")]
    screen = capfd.readouterr()
    assert "initiali" not in screen.err
    lines = screen.out.splitlines()[-5:]
    assert lines[0].split()[:3] == ["parallel.tp", "status", "step"]
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["1", "completed"], ["2", "completed"], ["3", "refused"], ["1", "completed"])
    ]


@pytest.mark.parametrize(
    ("faulty", "reasons"),
    [
        (["parallel.tp=3,5"], ["parallel.tp=3: must divide", "parallel.tp=5: must divide"]),
        (["seed=1,2", "data.paths=[gone.jsonl]"], ["data.paths=gone.jsonl: does not exist"] * 2),
        (["seed=1,x", "optim.freeze=[nothing]"], ["optim.freeze=nothing", "seed=x"]),
    ],
)
def test_if_every_job_is_invalid_nothing_starts(tmp_path, monkeypatch, capfd, faulty, reasons):
    """Rules, values that cannot be read, errors of data or model: no folder, no ranks, 78."""
    monkeypatch.setattr(local, "start_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    table = tmp_path / "table.json"
    text(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert train(tmp_path, "-m", *faulty, "run.dir=null", "--json", str(table)) == 78
    assert sorted(tmp_path.rglob("*")) == sorted([*before, table])
    jobs = json.loads(table.read_text())
    assert all(job["reason"].startswith(reason) for job, reason in zip(jobs, reasons, strict=True)), jobs
    assert {(job["status"], job["exit_code"], job["folder"]) for job in jobs} == {("refused", 78, None)}
    assert "optim.freeze=nothing" not in faulty or jobs[1]["reason"].count("optim.freeze=nothing: matches no") == 1
    assert capfd.readouterr().out.count("refused") == 2


@pytest.mark.parametrize(
    ("endings", "code", "started"),
    [
        (("completed", "completed"), 0, 2),
        (("completed", "preempted"), 75, 2),
        (("preempted", "failed"), 1, 2),
        (("diverged", "completed"), 1, 2),
        (("interrupted", "completed"), 75, 1),
    ],
)
def test_the_exit_code_of_a_sweep(tmp_path, monkeypatch, capfd, endings, code, started):
    """Failed before preempted before refused; after a signal to the launcher, the remaining jobs do not start."""
    left = list(endings)

    def launch(config, overrides, **more):
        ending = left.pop(0)
        status = "preempted" if ending == "interrupted" else ending
        return RunResult(status, 1, None, tmp_path, None, interrupted=ending == "interrupted")

    monkeypatch.setattr(sweep, "launch", launch)
    assert train(tmp_path, "-m", "seed=1,2") == code
    assert len(left) == 2 - started
    assert ("1 more job was not started" in capfd.readouterr().out) is (started == 1)


def _places(tmp_path, monkeypatch, *overrides):
    """The folder of each job of a sweep, which is created."""
    found = []

    def launch(config, overrides, *, place, **more):
        found.append((config.run.dir, claim(place(), tmp_path).path))
        return RunResult("completed", 1, None, found[-1][1], None)

    monkeypatch.setattr(sweep, "launch", launch)
    assert train(tmp_path, "-m", *overrides) == 0
    return [str(path.resolve().relative_to(tmp_path)) for _, path in found], [Path(intended) for intended, _ in found]


@pytest.mark.parametrize(
    ("given", "places"),
    [
        (["seed=1,2", "run.dir={}/all"], ["all/1", "all/2"]),
        (["seed=1,2", "run.dir={}/s${{seed}}"], ["s1", "s2"]),
        (["seed=1,2", "run.dir={}/a,{}/b"], ["a/1", "b/2", "a/3", "b/4"]),
        (["seed=1,2", "run.steps=1,2", "run.dir={}/s${{seed}}"], ["s1/1", "s1/2", "s2/3", "s2/4"]),
        (["seed=1,2,1", "run.dir={}/s${{seed}}"], ["s1/1", "s2", "s1/3"]),
        (["seed=1,2", "run.dir={}/x/../all,{}/all"], ["all/1", "all/2", "all/3", "all/4"]),
    ],
)
def test_each_job_resolves_its_own_folder(tmp_path, monkeypatch, given, places):
    """A folder of one job is its run folder; one that several jobs share holds numbered folders."""
    found, intended = _places(tmp_path, monkeypatch, *(text.format(tmp_path, tmp_path) for text in given))
    assert found == places
    assert len(set(found)) == len(found)
    assert all(path.name == Path(place).name for path, place in zip(intended, found, strict=True))


def test_each_job_resolves_its_own_root(tmp_path, monkeypatch):
    found, _ = _places(tmp_path, monkeypatch, "seed=1,2", "run.dir=null", f"run.root={tmp_path}/r${{seed}}")
    assert [place.split("/")[0] for place in found] == ["r1", "r2"]


def test_an_existing_folder_gets_a_number(tmp_path, monkeypatch):
    claim(tmp_path / "s2", tmp_path)
    found, _ = _places(tmp_path, monkeypatch, "seed=1,2", f"run.dir={tmp_path}/s${{seed}}")
    assert found == ["s1", "s2-2"]


def test_the_table_says_why_a_job_did_not_complete(tmp_path, monkeypatch, capfd):
    """A failure with its folder; an error of the launcher itself does not affect the other jobs."""
    endings = iter([("failed", "ValueError: the layer broke\nbecause"), None, ("completed", None)])

    def launch(config, overrides, **more):
        if (ending := next(endings)) is None:
            raise OSError("the disk is gone")
        return RunResult(ending[0], 1, None, tmp_path / "folder", ending[1])

    monkeypatch.setattr(sweep, "launch", launch)
    assert train(tmp_path, "-m", "seed=1,2,4") == 1
    header, *lines = capfd.readouterr().out.rstrip().splitlines()[-4:]
    assert header.endswith("reason")
    assert lines[0].endswith(f"{tmp_path}/folder  ValueError: the layer broke (and 1 more line)")
    assert lines[1].split()[:3] == ["2", "failed", "0"] and lines[1].endswith("  OSError: the disk is gone")
    assert lines[2].endswith(f"{tmp_path}/folder")


def test_the_last_of_several_values_of_a_key_is_shown(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sweep, "launch", lambda *_, **__: RunResult("completed", 1, None, tmp_path, None))
    assert train(tmp_path, "-m", "seed=7", "+seed=1,2") == 0
    assert [line.split()[0] for line in capfd.readouterr().out.rstrip().splitlines()[-3:]] == ["seed", "1", "2"]


@pytest.mark.parametrize("faulty", ["optim.lr=glob(*)", "seed=range(3,0)", "seed=range(0,1,0)", "seed=choice(1,"])
def test_a_malformed_sweep_is_rejected_in_one_line(tmp_path, capfd, faulty):
    assert train(tmp_path, "-m", faulty) == 78
    printed = capfd.readouterr().err
    assert printed.startswith(f"{faulty}: ") and len(printed.splitlines()) == 1


@pytest.mark.full
def test_four_layouts_overlay(tmp_path):
    assert train(tmp_path, "-m", "parallel.tp=1,2", "parallel.pp=1,2", f"run.dir={tmp_path}/all", "run.steps=5") == 0
    curves = [losses(tmp_path / "all" / str(number)) for number in range(1, 5)]
    assert all(curve == pytest.approx(curves[0], rel=1e-10) for curve in curves)
