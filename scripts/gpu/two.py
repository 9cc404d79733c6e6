"""Steps for two GPUs: values and speed of each axis, messages, hangs, and a profile."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.task import TINY, Task
from megastack.observe.metrics import read_metrics

LAYOUTS = {
    "dp2": ["parallel.dp=2"],
    "dp2 zero1": ["parallel.dp=2", "parallel.zero.stage=1"],
    "dp2 zero3": ["parallel.dp=2", "parallel.zero.stage=3"],
    "tp2": ["parallel.tp=2"],
    "tp2 without sequence parallelism": ["parallel.tp=2", "parallel.sequence_parallel=false"],
    "pp2 1f1b": ["parallel.pp=2"],
    "pp2 zb_h1": ["parallel.pp=2", "schedule=zb_h1"],
    "pp2 interleaved": ["parallel.pp=2", "schedule=interleaved", "schedule.chunks=2", "model.layers=4"],
}
LIMIT = 1e-4
"""The largest relative difference of an fp32 loss between a layout and one rank."""
STUCK = """
import time
from megastack import ParallelMLP

class Stuck(ParallelMLP):
    calls = 0

    def activate(self, up):
        Stuck.calls += 1
        if self.mesh.rank == 1 and Stuck.calls > 20:
            time.sleep(10_000)
        return super().activate(up)
"""


def layouts(task: Task) -> dict[str, Any]:
    """Every axis on two ranks: its losses against those of one rank, its speed and its exposed communication."""
    steps, found, wrong = f"run.steps={task.size(10, 2)}", {}, []
    chosen = dict(list(LAYOUTS.items())[: task.size(len(LAYOUTS), 3)])
    references = {}
    for name, overrides in chosen.items():
        model = tuple(each for each in overrides if each.startswith("model."))
        if model not in references:
            references[model] = task.train(Path(f"one_{len(references)}").resolve(), steps, *model)
        folder = Path(name.replace(" ", "_")).resolve()
        losses = task.train(folder, steps, *overrides)
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, references[model], strict=True))
        rows = read_metrics(folder / "metrics.jsonl")
        found[name] = {"difference": difference} | {key: rows[-1][key] for key in ("tokens_per_s", "exposed_s")}
        if difference > LIMIT:
            wrong.append(name)
    if wrong:
        raise AssertionError(f"losses differ from one rank's: {', '.join(wrong)}; {found}")
    return found


def messages(task: Task) -> dict[str, Any]:
    """The peak memory of a pipeline does not grow with the number of microbatches."""
    found, kinds = {}, ("peak_memory_bytes", "peak_reserved_bytes")
    for count in (8, 64):
        folder = Path(f"microbatches_{count}").resolve()
        size = [f"model.hidden={task.size(1024, 64)}", f"batch.sequence_length={task.size(2048, 64)}"]
        batch = [f"batch.global_size={count}", "batch.micro_size=1", "run.steps=3", "parallel.pp=2"]
        task.train(folder, *size, *batch)
        last = read_metrics(folder / "metrics.jsonl")[-1]
        found[f"{count} microbatches"] = {kind: last[kind] for kind in kinds}
    return found


def hang(task: Task) -> dict[str, Any]:
    """A rank that stops is named, within the time-out."""
    Path("stuck.py").write_text(STUCK)
    overrides = [*TINY, f"device={task.device}", "parallel.tp=2", "run.steps=50", "launch.timeout_s=15"]
    own = "model.mlp={_target_: stuck.Stuck}"
    command = [sys.executable, "-m", "megastack.cli", "train", *overrides, own, f"run.dir={Path('hang').resolve()}"]
    done = subprocess.run(command, capture_output=True, text=True)
    report = (done.stdout + done.stderr).splitlines()
    named = [line for line in report if "rank 1" in line]
    if done.returncode != 1 or not named:
        raise AssertionError(f"exit code {done.returncode}, and rank 1 is not named: {report[-20:]}")
    return {"report": named[:5]}


def profile(task: Task) -> dict[str, Any]:
    """A profiled step on two ranks: the traces open, and name actions and collectives."""
    folder = Path("profile").resolve()
    task.train(folder, "parallel.dp=2", "run.steps=4", "observe.profile_steps=[3]")
    found = {}
    for path in sorted(folder.glob("profile/step_3/*.json.gz")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = sorted({event["name"] for event in events if "all_reduce" in event.get("name", "")})
        found[path.name] = {"events": len(events), "collectives": names[:5]}
    if len(found) != 2:
        raise AssertionError(f"expected two traces, got {found}")
    return found
