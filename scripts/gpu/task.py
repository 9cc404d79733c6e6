"""What the steps of a check share: the device, the size, a training built in this process, and timing."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megastack import compose
from megastack.assemble.training import Training, build_training
from megastack.config.layout_rules import mesh_shape
from megastack.mesh.mesh import Mesh
from megastack.observe.metrics import read_metrics

TINY = (
    *("model=llama_byte", "model.layers=2", "model.hidden=64", "model.heads=4", "model.ffn=192"),
    *("batch.global_size=8", "batch.micro_size=2", "batch.sequence_length=64", "lr.warmup_steps=0"),
    *("checkpoint.at_end=false", "observe.tensorboard=false", "run.validate_every=0"),
)
REPEATS = 10


@dataclass(frozen=True)
class Task:
    """The device (``cuda`` or ``cpu``), and whether sizes are reduced to what a CPU computes in seconds."""

    device: str
    reduced: bool

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def size(self, full: int, reduced: int) -> int:
        """A size of this task."""
        return reduced if self.reduced else full

    def build(self, *overrides: str) -> Training:
        """Build a training in this process: one rank, or this rank of a process group that exists."""
        config = compose(["run.steps=100", f"device={self.device}", *overrides])
        return build_training(config, Mesh.from_environment(mesh_shape(config), device=self.device))

    def train(self, folder: Path, *overrides: str) -> list[float]:
        """Run ``megastack train`` and return its losses."""
        self.command("train", *TINY, f"device={self.device}", *overrides, f"run.dir={folder}")
        return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]

    def command(self, verb: str, *arguments: str, launcher: Sequence[str] = ()) -> str:
        """Run a ``megastack`` command and return its output; raises with its last lines if it fails."""
        program = [*launcher] if launcher else [sys.executable]
        done = subprocess.run(
            [*program, "-m", "megastack.cli", verb, *arguments], capture_output=True, text=True, env=dict(os.environ)
        )
        if done.returncode:
            raise RuntimeError(
                f"megastack {verb} ended with {done.returncode}:\n{done.stdout[-800:]}{done.stderr[-1500:]}"
            )
        return done.stdout

    def milliseconds(self, function: Callable[[], Any], repeats: int = REPEATS) -> float:
        """The median time of a call, after two calls that do not count; on a GPU until its kernels are done."""
        times = []
        for at in range(self.size(repeats, 2) + 2):
            self.synchronize()
            began = time.perf_counter()
            function()
            self.synchronize()
            if at >= 2:
                times.append((time.perf_counter() - began) * 1e3)
        return round(statistics.median(times), 3)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self, function: Callable[[], Any]) -> int | None:
        """The peak of allocated bytes above those before the call; ``None`` on a CPU."""
        if self.device != "cuda":
            function()
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before
