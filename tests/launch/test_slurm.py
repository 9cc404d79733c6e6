"""The documented batch script, with Slurm's programs replaced: through a warning and the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megastack.layers.mlp import ParallelMLP
from megastack.mesh.shape import Axis
from tests.tiny_runs import losses, overrides, status, train

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "slurm" / "train.sbatch"
WAIT_S = 60


class WarnedMLP(ParallelMLP):
    """In the third step of a job's first start, has Slurm warn the batch script, and waits for the signal."""

    def forward(self, hidden_BSD: Any, context: Any = None) -> Any:
        first = os.environ["SLURM_RESTART_COUNT"] == "0" and self.mesh[Axis.DP].rank == 1
        if first and self.training and context.step == 2 and not os.environ.get("WARNED"):
            os.environ["WARNED"] = "1"
            self.warn()
        return super().forward(hidden_BSD, context)

    def warn(self) -> None:
        seen, former = list[int](), signal.getsignal(signal.SIGUSR1)
        assert callable(former)
        signal.signal(signal.SIGUSR1, lambda *what: (seen.append(1), former(*what)))
        os.kill(int(os.environ["FAKE_BATCH"]), signal.SIGUSR1)
        deadline = time.monotonic() + WAIT_S
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.signal(signal.SIGUSR1, former)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with a ``scontrol`` that records its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder / "scontrol", f'echo "$@" >> {tmp_path}/asked')
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def batch(programs: Path, *arguments: str, restart: int = 0, **more: str) -> subprocess.Popen[str]:
    """The script as Slurm would start it, in a folder where outputs may be left."""
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "tiny", "SLURM_RESTART_COUNT": str(restart)}
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        env=os.environ | job | path | more,
        cwd=programs.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def asked(programs: Path) -> str:
    found = programs.parent / "asked"
    return found.read_text() if found.exists() else ""


@pytest.mark.full
def test_a_job_is_warned_requeued_and_completes(programs: Path, tmp_path: Path) -> None:
    """Two ranks stop after the third step, one finishes; equal to an uninterrupted run."""
    program(programs / "srun", f'exec {sys.executable} -m tests.launch.fake_srun "$@"')
    place = {"RUN_FOLDER": f"{tmp_path}/run"}
    tiny = [choice for choice in overrides(tmp_path) if not choice.startswith("run.dir")]
    tiny += ["run.steps=5", "checkpoint.at_end=true", "optim=adamw"]
    tiny += ["model.mlp={_target_: tests.launch.test_slurm.WarnedMLP}"]
    first = batch(programs, *tiny, FAKE_TASKS="2", **place)
    screen = first.communicate(timeout=WAIT_S * 4)[0]
    assert first.returncode == 75, screen
    assert asked(programs) == "requeue 17\n" and "saved; requeued" in screen
    stopped = status(tmp_path / "run")
    assert (stopped["status"], stopped["step"], stopped["reason"]) == ("preempted", 3, "received SIGUSR1")

    second = batch(programs, *tiny, restart=1, FAKE_TASKS="1", **place)
    screen = second.communicate(timeout=WAIT_S * 4)[0]
    assert second.returncode == 0, screen
    assert asked(programs) == "requeue 17\n"
    line = "restart 1: 1 node, 1 rank, dp 2 → 1, gradient accumulation 2 → 4; continues after step 3 (before: preempted"
    assert line in screen
    assert (status(tmp_path / "run")["status"], status(tmp_path / "run")["step"]) == ("completed", 5)
    assert train(tmp_path, "optim=adamw", "run.steps=5", f"run.dir={tmp_path}/straight") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "straight"), rel=1e-10)


def test_the_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.parametrize(
    ("code", "reason", "requeued"),
    [
        (0, None, False),
        (1, "ValueError", False),
        (78, None, False),
        (137, None, False),
        (75, "the time limit is reached", True),
        (75, "received SIGUSR1", True),
        (75, "received SIGTERM", False),  # cancelled
    ],
)
def test_only_a_job_that_was_warned_is_requeued(
    programs: Path, tmp_path: Path, code: int, reason: str | None, requeued: bool
) -> None:
    folder = tmp_path / "outputs" / "tiny-17"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"reason": reason}))
    program(programs / "srun", f'echo "$@"; exit {code}')
    job = batch(programs, "experiment=laptop", SLURM_SUBMIT_DIR=str(tmp_path))
    screen = job.communicate(timeout=WAIT_S)[0]
    assert job.returncode == code and (asked(programs) == "requeue 17\n") is requeued
    assert f"run.dir={folder}" in screen and screen.splitlines()[1].endswith("experiment=laptop")


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_warning_reaches_the_ranks_and_their_own_code_counts(programs: Path, tmp_path: Path, name: str) -> None:
    """Twice, while they still save."""
    program(
        programs / "srun",
        f"trap 'echo {name} >> heard' {name}\ntouch ready\n"
        'while [ "$(grep -c . heard 2>/dev/null)" != 2 ]; do sleep 0.05; done\nexit 75',
    )
    (tmp_path / "status.json").write_text(f"received SIG{name}")
    job = batch(programs, RUN_FOLDER=str(tmp_path))
    wait_for(lambda: (tmp_path / "ready").exists())
    job.send_signal(getattr(signal, f"SIG{name}"))
    wait_for(lambda: heard(tmp_path) == 1)
    job.send_signal(getattr(signal, f"SIG{name}"))
    job.communicate(timeout=WAIT_S)
    assert job.returncode == 75 and heard(tmp_path) == 2
    assert asked(programs) == ("requeue 17\n" if name == "USR1" else "")


def heard(folder: Path) -> int:
    path = folder / "heard"
    return len(path.read_text().splitlines()) if path.exists() else 0


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
