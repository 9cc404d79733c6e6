"""Steps: host synchronisations of a step, one rank of larger layouts, saving and loading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpu.task import TINY, Task

LAYOUTS = {
    "tp8": ("parallel.tp=8", "parallel.dp=1"),
    "dp4 tp2 zero1": ("parallel.dp=4", "parallel.tp=2", "parallel.zero.stage=1"),
    "dp8 zero3": ("parallel.dp=8", "parallel.zero.stage=3"),
}


@contextmanager
def no_synchronization(task: Task) -> Iterator[None]:
    """Make every host synchronisation inside raise (on a GPU)."""
    if task.device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def syncs(task: Task) -> dict[str, Any]:
    """A training step launches its kernels without waiting for the device."""
    found = {}
    for name, more in {"fp32": [], "bf16": ["precision=bf16"], "dropout": ["model.dropout=0.1"]}.items():
        training = task.build(*TINY, *more)
        for step in range(2):
            training.step(step)
        with no_synchronization(task):
            training.step(2)
        found[name] = "no synchronisation"
    return found


def layouts(task: Task) -> dict[str, Any]:
    """Rank 0 of layouts of eight ranks, with communication that does nothing: launch time, step time, memory."""
    found = {}
    sizes = (f"model.hidden={task.size(4096, 64)}", f"model.ffn={task.size(14336, 192)}", "model.heads=8")
    length = f"batch.sequence_length={task.size(4096, 64)}"
    for name, degrees in LAYOUTS.items():
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
        training = task.build(*TINY, *sizes, length, "precision=bf16", "batch.micro_size=1", *degrees)
        training.step(0)
        task.synchronize()
        began = time.perf_counter()
        training.step(1)
        launched = time.perf_counter() - began
        task.synchronize()
        whole = time.perf_counter() - began
        memory = torch.cuda.max_memory_allocated() if task.device == "cuda" else None
        found[name] = {"launch_ms": launched * 1e3, "step_ms": whole * 1e3, "peak_bytes": memory}
        dist.destroy_process_group()
    return found


def checkpoints(task: Task) -> dict[str, Any]:
    """Blocking and asynchronous saves, a resume, and an optimizer on the host, by the times that a run records."""
    found: dict[str, Any] = {}
    hidden = [f"model.hidden={task.size(2048, 64)}", f"model.ffn={task.size(8192, 192)}", "run.steps=4"]
    every = ["checkpoint.every=2", "checkpoint.at_end=true", "precision=bf16"]
    for name, more in {
        "blocking": [],
        "asynchronous": ["checkpoint.asynchronous=true"],
        "offload": ["parallel.zero.offload=true"],
    }.items():
        folder = Path(name).resolve()
        began = time.perf_counter()
        task.train(folder, *hidden, *every, *more)
        found[name] = {"run_s": round(time.perf_counter() - began, 2), "saves": _saves(folder)}
    began = time.perf_counter()
    losses = task.train(Path("resumed").resolve(), *hidden, "precision=bf16", "run.steps=6", f"resume={folder}")
    found["resumed"] = {"run_s": round(time.perf_counter() - began, 2), "steps": len(losses)}
    return found


def _saves(folder: Path) -> list[str]:
    from megastack.observe.files import read_records

    rows = read_records(folder / "metrics.jsonl")
    saved = [row for row in rows if row.get("name") == "checkpoint"]
    return [f"step {row['step']}: {row['seconds']:.3f} s, written in {row['write_seconds']:.3f} s" for row in saved]
