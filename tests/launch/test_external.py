"""The same command as a rank of torchrun and of srun, whose variables are set here for forked processes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megastack.cli import main
from tests.faulty_mlp import fault
from tests.tiny_runs import losses, overrides, status, train

ROOT = Path(__file__).resolve().parents[2]
fork = multiprocessing.get_context("fork")


def _port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def torchrun(rank: int, size: int) -> dict[str, str]:
    """What torchrun sets."""
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}


def slurm(rank: int, size: int) -> dict[str, str]:
    """What srun sets for a step on one node."""
    step = {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": rank, "SLURM_STEP_ID": 0, "SLURM_JOB_ID": 17}
    nodes = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": str(size)}
    return {name: str(value) for name, value in step.items()} | nodes


def _rank(environment: dict[str, str], arguments: list[str]) -> None:
    os.environ.update(environment)
    sys.exit(main(["train", *arguments]))


def join(folder: Path, launcher: Any, size: int, *more: str) -> list[int | None]:
    """Run ranks that a launcher of that kind would have started; their exit codes."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port()}
    arguments = [*overrides(folder), *more]
    ranks = [fork.Process(target=_rank, args=(launcher(rank, size) | address, arguments)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        rank.kill()
    return [rank.exitcode for rank in ranks]


def test_ranks_of_others_train_as_the_launchers_own(tmp_path, capfd):
    """One folder, one writer, the same losses; dp is what the world leaves."""
    choices = ("parallel.pp=2", "run.steps=3", "checkpoint.at_end=true")
    assert train(tmp_path, *choices, "parallel.dp=2", f"run.dir={tmp_path}/own") == 0
    capfd.readouterr()
    assert join(tmp_path, torchrun, 4, *choices) == [0, 0, 0, 0]
    assert join(tmp_path, slurm, 2, *choices, f"run.dir={tmp_path}/slurm") == [0, 0]
    screen = capfd.readouterr().out
    assert screen.count("step 1/3") == 2 and screen.count("run folder") == 2
    assert losses(tmp_path / "run") == losses(tmp_path / "own")
    assert losses(tmp_path / "slurm") == pytest.approx(losses(tmp_path / "own"), rel=1e-10)
    assert status(tmp_path / "run")["status"] == status(tmp_path / "slurm")["status"] == "completed"
    assert len(list((tmp_path / "run" / "logs").iterdir())) == 4


def test_every_rank_refuses_and_one_says_why(tmp_path, capfd):
    """A product that is not the world, and data that the first rank alone has looked at."""
    assert join(tmp_path, torchrun, 3, "parallel.tp=2") == [78, 78, 78]
    assert capfd.readouterr().err.count("parallel.dp=null") == 1
    assert join(tmp_path, slurm, 2, "data.paths=[none.jsonl]") == [78, 78]
    assert capfd.readouterr().err.count("none.jsonl") == 1 and not (tmp_path / "run").exists()


def test_a_failure_and_a_signal_under_srun(tmp_path, capfd):
    """Each rank exits with the code of the run; the record tells the rank that failed first."""
    assert join(tmp_path, slurm, 2, fault("raise")) == [1, 1]
    ended, screen = status(tmp_path / "run"), capfd.readouterr().err
    assert (ended["status"], ended["rank"], ended["step"], ended["exit_code"]) == ("failed", 1, 2, 1)
    assert screen.count("ValueError: the layer broke") == 2 and "[rank 1 | pp0 dp1 tp0] failed" in screen
    assert join(tmp_path, slurm, 2, fault("term"), f"run.dir={tmp_path}/stopped") == [75, 75]
    ended = status(tmp_path / "stopped")
    assert (ended["status"], ended["step"], ended["reason"]) == ("preempted", 3, "received SIGTERM")


@pytest.mark.full
def test_torchrun_itself(tmp_path):
    """From the script of a checkout; the losses are those of the launcher's own ranks."""
    choices = [*overrides(tmp_path), "parallel.tp=2", "parallel.pp=2", "run.steps=3"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--rdzv-backend", "c10d", str(ROOT / "scripts" / "train.py"), *choices]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert train(tmp_path, "parallel.tp=2", "parallel.pp=2", "run.steps=3", f"run.dir={tmp_path}/own") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "own")
