"""The same command as a rank of torchrun and of srun, whose variables are set here for forked processes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megastack.cli import main
from megastack.errors import ConfigError, DataError, MeshError
from megastack.launch import command, evaluate, external, worker
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
    sys.exit(main(arguments))


def join(
    folder: Path,
    launcher: Any,
    size: int,
    *more: str,
    stopped: int | None = None,
    port: str | None = None,
    verb: Sequence[str] | None = None,
) -> list[int | None]:
    """Run ranks that a launcher of that kind would have started; their exit codes. One that stops is killed."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or _port()}
    arguments = [*(verb or ["train", *overrides(folder)]), *more]
    ranks = [fork.Process(target=_rank, args=(launcher(rank, size) | address, arguments)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in sorted(range(size), key=lambda rank: rank == stopped):
        ranks[rank].join(0 if rank == stopped else 120)
        ranks[rank].kill()
        ranks[rank].join()
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
    more = ("parallel.tp=2", "seed=x", "optim.freeze=[nothing]", "data.paths=[none.jsonl]", "launch.timeout_s=x")
    assert join(tmp_path, torchrun, 3, *more) == [78, 78, 78]
    report = capfd.readouterr().err.splitlines()
    starts = ["seed=x", "launch.timeout_s=x", "parallel.dp=null", "optim.freeze=nothing", "data.paths=none.jsonl"]
    assert all(line.startswith(start) for line, start in zip(report, starts, strict=True)), report
    assert join(tmp_path, slurm, 2, "data.paths=[none.jsonl]") == [78, 78]
    assert capfd.readouterr().err.count("none.jsonl: does not exist") == 1 and not (tmp_path / "run").exists()


def test_a_rank_with_a_configuration_of_its_own_stops_all(tmp_path, capfd):
    """As where a variable of the environment is not the same on two machines: no rank waits for one that has left."""

    def odd(rank: int, size: int) -> dict[str, str]:
        return torchrun(rank, size) | {"WIDTH": "two" if rank else "32"}

    assert join(tmp_path, odd, 2, "model.ffn=${oc.env:WIDTH}") == [78, 78]
    assert capfd.readouterr().err == "model.ffn=two: must be a whole number (from ${oc.env:WIDTH})\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", [1, 2])
def test_a_port_in_use_is_named_by_rank_0_and_the_others_say_whom_they_missed(tmp_path, capfd, size):
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        codes = join(tmp_path, torchrun, size, "launch.timeout_s=3", port=port)
    said = capfd.readouterr().err
    assert codes == [78, 1][:size]
    assert said.count(f"MASTER_PORT={port}: port {port} of MASTER_ADDR=127.0.0.1 is in use; use another port") == 1
    missed = f"(it could not be reached at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port})"
    assert said.count(missed) == size - 1 and "Traceback" not in said


def _only_on(rank: int, real: Any, error: Exception) -> Any:
    """A function that one rank alone cannot call."""

    def call(*arguments: Any, **options: Any) -> Any:
        if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == rank:
            raise error
        return real(*arguments, **options)

    return call


@pytest.mark.parametrize("launcher", [torchrun, slurm])
def test_data_that_one_rank_alone_cannot_read_is_reported_once_by_that_rank(tmp_path, monkeypatch, capfd, launcher):
    """As where a file is not the same on two machines."""
    error = DataError("data.paths=x.bin: is shorter than its index says")
    monkeypatch.setattr(worker, "build_training", _only_on(1, worker.build_training, error))
    assert join(tmp_path, launcher, 2) == [78, 78]
    assert capfd.readouterr().err.splitlines() == [f"[rank 1] {error}"]
    ended = status(tmp_path / "run")
    assert (ended["rank"], ended["reason"], ended["exit_code"]) == (1, str(error), 78)


def test_data_that_no_rank_can_read_is_reported_once(tmp_path, monkeypatch, capfd):
    def broken(*arguments: Any) -> Any:
        raise DataError("data.paths=x.bin: is shorter than its index says")

    monkeypatch.setattr(worker, "build_training", broken)
    assert join(tmp_path, torchrun, 3, "batch.global_size=6") == [78, 78, 78]
    assert capfd.readouterr().err.count("is shorter than its index says") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_files_of_the_configuration_that_one_rank_alone_lacks(tmp_path, monkeypatch, capfd, rank):
    error = ConfigError("--config-dir=mine: no such folder")
    monkeypatch.setattr(command, "compose_partial", _only_on(rank, command.compose_partial, error))
    assert join(tmp_path, torchrun, 2) == [78, 78]
    assert capfd.readouterr().err.splitlines() == [str(error)] and not (tmp_path / "run").exists()


def test_a_device_that_one_rank_alone_lacks_stops_all_before_there_is_a_run(tmp_path, monkeypatch, capfd):
    error = MeshError("device=cuda: local rank 1 of this machine, which has 1 GPUs; use device=cpu, or fewer ranks")
    monkeypatch.setattr(external, "pick_device", _only_on(1, external.pick_device, error))
    assert join(tmp_path, torchrun, 2) == [78, 78]
    assert capfd.readouterr().err.splitlines() == [f"[rank 1] {error}"] and not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["_file", "_score"])
def test_an_evaluation_that_one_rank_alone_refuses_is_reported_once(tmp_path, monkeypatch, capfd, place):
    """Before and after the ranks meet."""
    assert train(tmp_path, "run.steps=1", "checkpoint.at_end=true") == 0
    capfd.readouterr()
    error = DataError("--file x: is empty")
    monkeypatch.setattr(evaluate, place, _only_on(1, getattr(evaluate, place), error))
    verb = ["evaluate", str(tmp_path / "run"), "--file", str(tmp_path / "text.jsonl")]
    codes = join(tmp_path, torchrun, 2, "parallel.dp=2", "launch.timeout_s=20", verb=verb)
    said = capfd.readouterr().err
    assert codes == [78, 78] and said.count("--file x: is empty") == 1, said
    assert "Traceback" not in said


def test_a_failure_and_a_signal_under_srun(tmp_path, capfd):
    """Each rank exits with the code of the run; the record tells the rank that failed first."""
    assert join(tmp_path, slurm, 2, fault("raise")) == [1, 1]
    ended, screen = status(tmp_path / "run"), capfd.readouterr().err
    assert (ended["status"], ended["rank"], ended["step"], ended["exit_code"]) == ("failed", 1, 2, 1)
    assert screen.count("ValueError: the layer broke") == 2 and "[rank 1 | pp0 dp1 tp0] failed" in screen
    assert join(tmp_path, slurm, 2, fault("term"), f"run.dir={tmp_path}/stopped") == [75, 75]
    ended = status(tmp_path / "stopped")
    assert (ended["status"], ended["step"], ended["reason"]) == ("preempted", 3, "received SIGTERM")


CHAIN = ("parallel.pp=3", "model.layers=3", "batch.micro_size=1", "launch.timeout_s=3")
LOST = (
    r"\[rank 0 \| pp0 dp0 tp0\] waits for pp receive \d+ of \[1, 16, 16\] from rank 1 in training step 3, action 0B0\n"
    r"\[rank 1 \| pp1 dp0 tp0\] waits for pp receive \d+ of \[1, 16, 16\] from rank 2 in training step 3, action 1B0\n"
    r"\[rank 2 \| pp2 dp0 tp0\] did not arrive at pp send \d+ of \[1, 16, 16\] to rank 1 within launch.timeout_s=3\n"
)


@pytest.mark.full
def test_a_rank_that_stops_calling_is_named_by_one_of_those_that_wait(tmp_path, capfd):
    """The accounts of all are put together as by a launcher of our own; nobody tells it twice."""
    assert join(tmp_path, torchrun, 3, *CHAIN, fault("stop"), stopped=2) == [1, 1, -9]
    screen, ended = capfd.readouterr().err, status(tmp_path / "run")
    assert re.search(LOST + r"\Z", screen) and screen.count("did not arrive") == 1, screen
    assert (ended["status"], ended["rank"], ended["coordinates"], ended["step"]) == ("failed", 2, "pp2 dp0 tp0", 2)
    assert ended["reason"].startswith("did not arrive at pp send")


@pytest.mark.parametrize("absent", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_rank_that_never_comes_is_named_before_there_is_a_run(tmp_path, monkeypatch, capfd, absent):
    """Also the one whose store the others would ask."""
    real = external.join

    def joins(*arguments: Any, **options: Any) -> Any:
        if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0))) == absent:
            os.kill(os.getpid(), signal.SIGSTOP)
        return real(*arguments, **options)

    monkeypatch.setattr(external, "join", joins)
    assert join(tmp_path, slurm, 3, "launch.timeout_s=2", "batch.global_size=6", stopped=absent).count(1) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    said = f"[rank {absent} | pp0 dp{absent} tp0] did not join within launch.timeout_s=2"
    assert sum(line.startswith(said) for line in lines) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_torchrun_gives_the_ranks_the_time_to_name_the_one_that_stopped(tmp_path):
    """It ends every rank when the first has ended; what it has to say itself comes after."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--rdzv-backend", "c10d", str(ROOT / "scripts" / "train.py"), *overrides(tmp_path), *CHAIN]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command.append(fault("stop"))
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and len(re.findall(LOST, done.stderr)) == 1, done.stderr
    assert status(tmp_path / "run")["rank"] == 2


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
