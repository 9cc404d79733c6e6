"""Runs on several ranks of this machine: what they leave on disk and on the screen, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import megastack
from megastack.checkpoint.reader import CheckpointReader
from megastack.launch.run import on_ranks
from megastack.training.state import Hooks
from tests.faulty_mlp import fault
from tests.tiny_runs import events, losses, overrides, rows, status, train

TRAIN_KEYS = (
    *("kind", "step", "time", "loss", "grad_norm", "lr", "tokens", "consumed_tokens", "consumed_samples", "skipped"),
    *(
        "step_time_s",
        "tokens_per_s",
        "tokens_per_s_per_device",
        "peak_memory_bytes",
        "peak_memory_rank",
        "peak_reserved_bytes",
        "peak_reserved_rank",
        "model_tflops_per_device",
        "mfu",
        "bubble",
        "step_bubble",
    ),
    *("wire_bytes", "exposed_s", "loss_scale"),
)
ADAM = ("optim=adamw", "lr=cosine", "lr.total_steps=10", "lr.warmup_steps=2", "model.dropout=0.1")


def test_ten_steps_on_a_grid_leave_ten_rows_and_all_records(tmp_path, capfd):
    """One writer whatever the layout; each message once on the screen, which is no terminal."""
    more = ("parallel.pp=2", "parallel.dp=2", "run.steps=10", "checkpoint.every=4", "checkpoint.at_end=true")
    assert train(tmp_path, *more, "run.validate_every=5", "observe.dump_steps=[3]") == 0
    run, found = tmp_path / "run", rows(tmp_path / "run")

    lines = [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))
    for row in found:
        assert tuple(row) == TRAIN_KEYS
        assert row["mfu"] is None and row["bubble"] is None and row["step_bubble"] is None
        assert set(row["wire_bytes"]) >= {"dp", "pp"} and row["peak_memory_bytes"] > 1e6
        assert 0 <= row["peak_memory_rank"] < 4 and row["peak_reserved_bytes"] is row["peak_reserved_rank"] is None
        assert row["tokens_per_s_per_device"] == row["tokens_per_s"] / 4
    assert sum(row["tokens"] for row in found) == found[-1]["consumed_tokens"]
    assert found[-1]["consumed_samples"] == 40 and found[-1]["skipped"] == 0
    assert all(f'"loss": {row["loss"]!r},' in line for row, line in zip(found, lines, strict=True))
    scored = rows(run, "validation")
    assert [row["step"] for row in scored] == [5, 10]
    assert all(tuple(row) == ("kind", "step", "time", "loss", "tokens", "samples") for row in scored)
    assert [event["name"] for event in events(run)] == ["start", "checkpoint", "checkpoint", "checkpoint", "end"]

    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        *("latest", "step_00000004", "step_00000008", "step_00000010")
    ]
    assert {path.name for path in (run / "logs").iterdir()} == {f"rank_{rank:05d}.log" for rank in range(4)}
    assert "[rank 3 | pp1 dp1 tp0]" in (run / "logs" / "rank_00003.log").read_text()
    assert {"config.yaml", "overrides.yaml"} <= {path.name for path in (run / ".hydra").iterdir()}
    from safetensors.torch import load_file

    dump = load_file(run / "dump" / "step_3.safetensors")
    kinds = {name.partition("/")[0] for name in dump}
    assert kinds == {"gradients", "weights"} and len(dump) == 2 * len({n.partition("/")[2] for n in dump})
    ended = status(run)
    assert (ended["status"], ended["step"], ended["exit_code"]) == ("completed", 10, 0)
    assert ended["checkpoint"].endswith("step_00000010") and ended["rank"] is None and ended["pid"] == os.getpid()

    screen = capfd.readouterr()
    assert "\x1b" not in screen.out and screen.err == ""
    assert screen.out.count("step  7/10") == 1 and screen.out.count("run folder") == 1
    assert "completed after step 10" in screen.out.splitlines()[-1]


def test_resume_continues_bitwise_and_moves_to_other_layouts(tmp_path):
    """5 steps, then 5 more, in the same folder (auto) or a new one (a path), equal 10 straight ones."""
    layout = (*ADAM, "parallel.dp=2", "checkpoint.at_end=true", "checkpoint.every=5")
    assert train(tmp_path, *layout, "run.steps=10", f"run.dir={tmp_path}/straight") == 0
    assert train(tmp_path, *layout, "run.steps=5", "resume=auto") == 0
    assert train(tmp_path, *layout, "run.steps=10", "resume=auto") == 0
    assert train(tmp_path, *layout, "run.steps=10") == 78  # a fresh run never mixes with an old one
    run, straight = tmp_path / "run", tmp_path / "straight"
    assert losses(run) == losses(straight)
    assert [row["lr"] for row in rows(run)] == [row["lr"] for row in rows(straight)]
    assert rows(run)[-1]["consumed_tokens"] == rows(straight)[-1]["consumed_tokens"]
    assert [event["name"] for event in events(run)] == ["start", "checkpoint", "end", "resume", "checkpoint", "end"]
    ends = [CheckpointReader(folder / "checkpoints" / "step_00000010") for folder in (run, straight)]
    assert ends[0].names == ends[1].names
    assert all(torch.equal(ends[0].read(name), ends[1].read(name)) for name in ends[0].names)

    middle = straight / "checkpoints" / "step_00000005"
    elsewhere = (*ADAM, "run.steps=10", f"resume={middle}", "parallel.pp=2", "batch.micro_size=2")
    assert train(tmp_path, *elsewhere, f"run.dir={tmp_path}/moved") == 0
    assert [row["step"] for row in rows(tmp_path / "moved")] == [6, 7, 8, 9, 10]
    assert losses(tmp_path / "moved") == pytest.approx(losses(straight)[5:], rel=1e-10)


@pytest.mark.parametrize("what", ["raise", "kill"])
def test_a_failing_rank_ends_the_run_and_is_named(tmp_path, capfd, what):
    """The last lines name the rank that failed, not those that lost touch with it; nothing goes on running."""
    assert train(tmp_path, "parallel.pp=2", "parallel.tp=2", fault(what)) == 1
    ended, lines = status(tmp_path / "run"), capfd.readouterr().err.rstrip().splitlines()
    assert (ended["status"], ended["exit_code"], ended["rank"]) == ("failed", 1, 3)
    assert ended["coordinates"] == "pp1 dp0 tp1" and ended["step"] == 2
    if what == "raise":
        assert lines[-1].startswith("[rank 3 | pp1 dp0 tp1] failed in training step 3, action 1F")
        assert lines[-1].endswith("ValueError: the layer broke") and any("faulty_mlp.py" in line for line in lines)
    else:
        assert lines[-1].startswith("[rank 3 | pp1 dp0 tp1] ended")
    for log in (tmp_path / "run" / "logs").iterdir():
        pid = int(log.read_text().split("started with pid ")[1].split()[0])
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("case", ["term", "launcher", "validation"])
def test_a_signal_to_any_process_stops_all_ranks_after_the_same_step(tmp_path, case, capfd):
    """SIGTERM to one rank in a step or in a validation, or Ctrl-C to the launcher: saved, 75, and resumable."""
    what = fault("launcher" if case == "launcher" else "term", in_validation=case == "validation")
    more = ("parallel.pp=2", "parallel.dp=2", "run.steps=200", "run.validate_every=2", "lr.total_steps=200")
    assert train(tmp_path, *more, what) == 75
    ended, run = status(tmp_path / "run"), tmp_path / "run"
    reason = "received SIGINT" if case == "launcher" else "received SIGTERM"
    assert (ended["status"], ended["exit_code"], ended["reason"]) == ("preempted", 75, reason)
    assert [event["reason"] for event in events(run)[-2:]] == [reason, reason]
    assert ended["step"] == rows(run)[-1]["step"] and 2 <= ended["step"] < 200
    if case == "validation":  # of step 2: it ends between two batches, and leaves no row
        assert ended["step"] == 2 and not rows(run, "validation")
    assert [path.name for path in (run / "checkpoints").glob("step_*")] == [f"step_{ended['step']:08d}"]
    assert [event["name"] for event in events(run)][-3:] == ["checkpoint", "preempt", "end"]
    if case == "term":
        assert ended["step"] == 3
        steps = ("run.steps=5", "run.validate_every=0", "lr.total_steps=200", "parallel.dp=2")
        assert train(tmp_path, *steps, "resume=auto") == 0
        assert train(tmp_path, *steps, f"run.dir={tmp_path}/straight") == 0
        assert losses(run) == pytest.approx(losses(tmp_path / "straight"), rel=1e-10)


def test_a_time_limit_stops_the_run_resumably(tmp_path):
    assert train(tmp_path, "parallel.dp=2", "run.steps=100000", "run.time_limit_s=0.5", "run.log_every=1000") == 75
    ended = status(tmp_path / "run")
    assert ended["reason"] == "the time limit is reached" and ended["step"] == len(rows(tmp_path / "run")) < 100000
    assert Path(ended["checkpoint"]).name == f"step_{ended['step']:08d}"


def test_a_rank_that_does_not_stop_is_killed_after_the_grace(tmp_path, capfd):
    """The rank sleeps with SIGTERM blocked; the others wait for it."""
    hang = fault("hang")
    stop = Hooks(on_step=[lambda row: os.kill(os.getppid(), 15) if row["step"] == 2 else None])
    config = megastack.compose([*overrides(tmp_path), "parallel.dp=2", "run.steps=50", "launch.grace_s=1", hang])
    result = megastack.train(config, hooks=stop)
    if result.status == "failed":  # else all of them stopped before the third step
        assert result.exit_code == 1 and "launch.grace_s" in str(result.reason)
    assert result.interrupted


def test_hooks_are_called_on_every_rank(tmp_path):
    def note(kind):
        return lambda *facts: (tmp_path / f"{kind}-{os.getpid()}").open("a").write(f"{facts[0]}\n")

    hooks = Hooks([note("step")], [note("validation")], [note("checkpoint")])
    more = ("parallel.dp=2", "run.steps=3", "checkpoint.every=2", "checkpoint.at_end=true", "run.validate_every=2")
    result = megastack.train(megastack.compose([*overrides(tmp_path), *more]), hooks=hooks)
    assert (result.status, result.step, result.exit_code) == ("completed", 3, 0)
    assert result.loss == losses(tmp_path / "run")[-1] and result.folder == tmp_path / "run"
    for kind, calls in {"step": 3, "checkpoint": 2, "validation": 2}.items():
        assert [len(path.read_text().splitlines()) for path in tmp_path.glob(f"{kind}-*")] == [calls, calls]


def test_a_rank_with_two_threads_computes(tmp_path):
    assert (
        train(tmp_path, "launch.threads_per_rank=2", "run.steps=1", "model.hidden=128", "data.validation_fraction=0")
        == 0
    )
    assert "2 threads" in (tmp_path / "run" / "logs" / "rank_00000.log").read_text()


SCRIPT = """
import megastack, os, torch
open("started", "a").write("x")
torch.set_num_threads(2)
a = torch.ones(512, 512, requires_grad=True)
(a @ a).exp().sum().backward()  # this process has a pool of OpenMP threads now
seen = []
hooks = megastack.Hooks(on_step=[lambda row: seen.append(open(f"step-{os.environ['RANK']}-{row['step']}", "a"))])
for overrides in {runs}:
    result = megastack.train(megastack.compose(overrides), hooks=hooks)
    assert (result.status, seen) == ("completed", []), result
(a @ a).sum()
"""


@pytest.mark.parametrize("how", ["file", pytest.param("stdin", marks=pytest.mark.full)])
def test_a_script_without_a_main_guard_trains_on_any_number_of_threads(tmp_path, how):
    """Closures as hooks, in a process that computed on several threads; the script runs once."""
    runs = [
        [*overrides(tmp_path), f"launch.threads_per_rank={n}", f"parallel.dp={n}", "run.steps=1", "model.hidden=256"]
        for n in ((2,) if how == "file" else (1, 2))
    ]
    (tmp_path / "script.py").write_text(SCRIPT.replace("{runs}", repr(runs)))
    command = [sys.executable, *(["script.py"] if how == "file" else ["-"])]
    root = str(Path(megastack.__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": root}
    with (tmp_path / "script.py").open() as stdin:
        subprocess.run(command, cwd=tmp_path, env=environment, stdin=stdin, timeout=120, check=True)
    assert (tmp_path / "started").read_text() == "x"
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-0-1", "step-1-1"}


def test_a_process_that_has_used_a_gpu_is_told_that_it_cannot_fork_ranks_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != parent)
    parent = os.getpid()
    config = megastack.compose([*overrides(tmp_path), "device=auto", "run.steps=1"])
    with pytest.raises(megastack.ConfigError, match=r"^device=auto: ranks are forked from .*; use cpu, train before"):
        megastack.train(config)
    assert not (tmp_path / "run").exists()
    assert train(tmp_path, "device=cpu", "run.steps=1") == 0


PROBES = (
    *("is_available", "init", "_lazy_init", "is_initialized", "current_device", "set_device", "current_stream"),
    *("get_device_name", "get_device_properties", "get_device_capability", "mem_get_info", "synchronize"),
    *("manual_seed", "manual_seed_all", "get_rng_state", "is_bf16_supported", "empty_cache", "device_count"),
)
"""Functions that call the CUDA runtime; device_count does where NVML is missing."""


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_the_launcher_leaves_the_cuda_runtime_to_its_ranks(tmp_path, monkeypatch, device):
    """After one such call in this process, no rank that is forked from it could use a GPU."""
    launcher = os.getpid()

    def only_in_ranks(probe):
        def call(*arguments, **options):
            assert os.getpid() != launcher, f"torch.cuda.{probe.__name__} in the launcher"
            return probe(*arguments, **options)

        return call

    for name in PROBES:
        monkeypatch.setattr(torch.cuda, name, only_in_ranks(getattr(torch.cuda, name)))
    assert train(tmp_path, f"device={device}", "parallel.dp=2", "batch.micro_size=1", "run.steps=1") == 0


def test_more_ranks_than_gpus_are_rejected_before_anything_starts(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("auto", "cuda"):
        assert train(tmp_path, f"device={device}", "parallel.dp=4", "batch.micro_size=1") == 78
        error = f"device={device}: 4 ranks (pp·dp·cp·tp) need a GPU each, and this machine has 2 GPUs; use cpu, degrees"
        assert error in capfd.readouterr().err and not (tmp_path / "run").exists()
    config = megastack.compose([*overrides(tmp_path), "device=cuda", "parallel.tp=2", "parallel.pp=2"])
    with pytest.raises(megastack.ConfigError, match=r"^device=cuda: 4 ranks .* and this machine has 2 GPUs"):
        on_ranks("task", config, lambda config, mesh: None)


def test_the_waits_of_the_first_rank_are_in_its_rows(tmp_path):
    assert train(tmp_path, "parallel.tp=2", "run.steps=2") == 0
    for row in rows(tmp_path / "run"):
        assert set(row["exposed_s"]) == {"tp"} and 0 < row["exposed_s"]["tp"] < row["step_time_s"]


def test_a_process_that_holds_a_process_group_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(megastack.ConfigError, match=r"process group; use torch\.distributed\.destroy"):
        megastack.train(megastack.compose([*overrides(tmp_path), "run.steps=1"]))
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_nothing_is_left_of_a_killed_launcher(tmp_path):
    command = [
        sys.executable,
        "-m",
        "megastack.cli",
        "train",
        *overrides(tmp_path),
        "parallel.tp=2",
        "run.steps=100000",
    ]
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists():
        time.sleep(0.1)
    launcher.kill()
    launcher.wait()
    time.sleep(1)
    size = metrics.stat().st_size
    time.sleep(1)
    assert metrics.stat().st_size == size


@pytest.mark.full
def test_runs_that_start_together_get_folders_of_their_own(tmp_path):
    command = [sys.executable, "-m", "megastack.cli", "train", *overrides(tmp_path), "run.steps=1", "run.dir=null"]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [run.wait() for run in runs] == [0, 0, 0]
    assert len(list(tmp_path.glob("20*/*/status.json"))) == 3
