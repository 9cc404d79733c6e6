"""Agents of torchrun that stand for nodes: killed, joined by another one, or with a worker that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megastack.checkpoint.reader import CheckpointReader
from tests.faulty_mlp import fault
from tests.launch.test_elastic import starts
from tests.tiny_runs import events, losses, overrides, rows, status, train

ROOT = Path(__file__).resolve().parents[2]
JOB = ("run.steps=12", "checkpoint.every=2", "checkpoint.at_end=true", "optim=adamw", "lr=cosine", "model.dropout=0.1")
CALLS = "is_host=0,last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=10"
WAIT_S = 240


class Nodes:
    """Agents of one job, each with two workers; the rendezvous is held by this process."""

    def __init__(self, folder: Path, *choices: str) -> None:
        self.run = folder / "run"
        self._folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._choices = [*overrides(folder), *JOB, "launch.elastic=true", "resume=auto", *choices]
        self.agents: list[subprocess.Popen[bytes]] = []

    def add(self) -> None:
        """One more node."""
        place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._store.port}", "--rdzv-conf", CALLS)
        size = ("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--local-addr", "127.0.0.1")
        command = [sys.executable, "-m", "torch.distributed.run", *size, *place, str(ROOT / "scripts" / "train.py")]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self._folder / f"node_{len(self.agents)}.log").open("wb") as log:
            agent = subprocess.Popen([*command, *self._choices], env=environment, stdout=log, stderr=log)
        self.agents.append(agent)

    def worker(self, rank: int) -> int:
        """The process of a rank."""
        log = self.run / "logs" / f"rank_{rank:05d}.log"
        wait_for(lambda: log.exists() and "started with pid" in log.read_text())
        return int(log.read_text().rpartition("started with pid ")[2].split()[0])

    def saved(self, step: int) -> None:
        """Wait for a checkpoint."""
        wait_for((self.run / "checkpoints" / f"step_{step:08d}").exists)

    def ends(self) -> list[int]:
        """The exit codes of the agents."""
        return [agent.wait(WAIT_S) for agent in self.agents]

    def screen(self) -> str:
        """All that was shown."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("node_*.log")))

    def kill(self) -> None:
        """End what still runs."""
        for agent in self.agents:
            agent.kill()
            agent.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made = list[Nodes]()

    def make(*choices: str) -> Nodes:
        made.append(Nodes(tmp_path, *choices))
        return made[-1]

    yield make
    for each in made:
        each.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def straight(folder: Path, *choices: str) -> Path:
    """The same job without an interruption."""
    assert train(folder, *JOB, f"run.dir={folder}/straight", *choices) == 0
    return folder / "straight"


def require_equal(run: Path, other: Path, *, bitwise: bool = False) -> None:
    """Every row and the final weights and moments are those of the other run."""
    assert [row["step"] for row in rows(run)] == list(range(1, 13))
    for name in ("lr", "tokens", "consumed_tokens", "consumed_samples"):
        assert [row[name] for row in rows(run)] == [row[name] for row in rows(other)]
    ends = [CheckpointReader(folder / "checkpoints" / "step_00000012") for folder in (run, other)]
    for name in ends[0].names:
        ours, theirs = ends[0].read(name), ends[1].read(name)
        if bitwise:
            assert torch.equal(ours, theirs), name
        else:
            bound = 1e-10 * max(1e-3, float(theirs.abs().max()))
            assert torch.allclose(ours, theirs, rtol=0, atol=bound), name
    assert losses(run) == losses(other) if bitwise else losses(run) == pytest.approx(losses(other), rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 3])
def test_a_job_goes_on_without_a_node_that_is_killed(
    tmp_path: Path, nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """Whether or not it is the one with the first rank; its workers end with it, and so does a store they keep."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(victim == 0)))
    job = nodes(fault("nothing", slow=0.1))
    job.add()
    job.add()
    job.saved(4)
    workers = [job.worker(rank) for rank in range(4)]
    [agent] = [agent for agent in job.agents if agent.pid == parent(workers[victim])]
    agent.send_signal(signal.SIGKILL)
    lost = agent.pid
    assert sorted(job.ends()) == [-signal.SIGKILL, 0], job.screen()
    assert not any(alive(pid) for pid in workers), lost

    [first, second] = starts(job.run)
    assert (first["nodes"], first["dp"], second["nodes"], second["dp"]) == (2, 4, 1, 2)
    told = "restart 1: 1 node, 2 ranks, dp 4 → 2, gradient accumulation 1 → 2; goes on after step "
    assert f"{told}{second['step']} (before it: failed" in job.screen()
    assert (status(job.run)["status"], status(job.run)["step"]) == ("completed", 12)
    require_equal(job.run, straight(tmp_path, "parallel.dp=4"))


@pytest.mark.full
def test_a_job_takes_in_a_node_that_comes_later(
    tmp_path: Path, nodes: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that are there save first, so that nothing is done twice."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    job = nodes(fault("nothing", slow=0.3))
    job.add()
    job.saved(2)
    job.add()
    assert job.ends() == [0, 0], job.screen()
    [first, second] = starts(job.run)
    assert (first["dp"], second["dp"]) == (2, 4)
    assert "(before it: preempted received SIGTERM)" in job.screen()
    lines = (job.run / "metrics.jsonl").read_text().splitlines()
    assert sum('"kind": "train"' in line for line in lines) == 12
    require_equal(job.run, straight(tmp_path, "parallel.dp=4"))


@pytest.mark.full
def test_a_worker_that_is_killed_comes_back_bitwise(tmp_path: Path, nodes: Callable[..., Nodes]) -> None:
    """Twice, with the same degrees, in the store that the earlier starts have used."""
    job = nodes(fault("nothing", slow=0.1))
    job.add()
    for step in (2, 6):
        job.saved(step)
        os.kill(job.worker(1), signal.SIGKILL)
        wait_for(lambda count=step // 4 + 2: len(starts(job.run)) == count)  # type: ignore[misc]
    assert job.ends() == [0], job.screen()
    assert [start["dp"] for start in starts(job.run)] == [2, 2, 2]
    assert job.screen().count("failed, rank 1 ended without a word)") == 2
    assert [event["name"] for event in events(job.run)].count("restart") == 2
    require_equal(job.run, straight(tmp_path, "parallel.dp=2"), bitwise=True)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False
