"""What ``srun [options] PYTHON -m megastack.cli …`` does, on this machine: as many tasks as ``FAKE_TASKS`` says.

Tasks are forked from one process, signals are passed on to them, and the exit code is the highest of theirs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from types import FrameType

import torch

from megastack.cli.main import main

NODE = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": "1"}


def task(rank: int, tasks: int, arguments: list[str]) -> None:
    own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": tasks}
    os.environ.update(NODE | {name: str(value) for name, value in own.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    sys.exit(main(arguments))


def srun(arguments: list[str]) -> int:
    """The exit code of ``srun``."""
    torch.set_num_threads(1)
    os.environ["FAKE_BATCH"] = str(os.getppid())
    tasks, command = int(os.environ["FAKE_TASKS"]), arguments[arguments.index("megastack.cli") + 1 :]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=task, args=(rank, tasks, command)) for rank in range(tasks)]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.pid is not None:
                os.kill(rank.pid, number)

    for rank in ranks:
        rank.start()
    signal.signal(signal.SIGUSR1, pass_on)
    for rank in ranks:
        rank.join()
    return max(128 - code if code < 0 else code for code in (rank.exitcode or 0 for rank in ranks))


if __name__ == "__main__":
    sys.exit(srun(sys.argv[1:]))
