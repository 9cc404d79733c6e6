"""Checks of a machine with GPUs, one after another, each in a process of its own with a time limit.

    python scripts/gpu_checks.py first|two [--out FILE] [--only STEP …] [--skip STEP …] [--reduced] [--device cpu]

``first`` needs one GPU, ``two`` needs two. The results are one JSON object, which is rewritten after every step: the
state of each step (``ok``, ``failed``, ``timed out`` or ``skipped``), its seconds, and its figures or its error.
``--reduced`` uses tiny sizes, with which all steps also run on a CPU (``--device cpu``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from gpu.steps import SETS, Step
from gpu.task import Task

ERROR_LINES = 15
REDUCED_SLOWER = 5
"""The factor on the time limits where a CPU runs the reduced steps."""


def run_step(step: Step, task: Task, limit_s: float) -> dict[str, Any]:
    """Run a step in a process of its own, which ends with all its children at the limit."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, output = Path(folder) / "result.json", Path(folder) / "output.txt"
        command = [sys.executable, __file__, "--step", step.name, "--result", str(result), "--device", task.device]
        command += ["--reduced"] if task.reduced else []
        with output.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder, start_new_session=True)
            try:
                process.wait(limit_s)
                state = "ok" if process.returncode == 0 else "failed"
            except subprocess.TimeoutExpired:
                state = "timed out"
            finally:
                _end(process)
        found: dict[str, Any] = {"state": state, "seconds": round(time.monotonic() - began, 1)}
        if result.exists():
            found |= json.loads(result.read_text())
        if state != "ok":
            found.setdefault("error", "\n".join(output.read_text(errors="replace").splitlines()[-ERROR_LINES:]))
        return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def run_one(name: str, task: Task, result: Path) -> None:
    """Run a step in this process and write its figures."""
    step = next(step for steps in SETS.values() for step in steps if step.name == name)
    try:
        result.write_text(json.dumps({"figures": step.run(task)}))
    except Exception as error:
        trace = traceback.format_exc().splitlines()[-ERROR_LINES:]
        result.write_text(json.dumps({"error": f"{type(error).__name__}: {error}", "trace": trace}))
        raise SystemExit(1) from error


def main() -> None:
    """Parse the arguments, run the steps and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", nargs="?", choices=SETS, default="first")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--skip", nargs="+", default=[])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    task = Task(options.device, options.reduced)
    if options.step:
        run_one(options.step, task, options.result)
        return
    steps = SETS[options.set]
    if unknown := {*options.only, *options.skip} - {step.name for step in steps}:
        parser.error(f"unknown step {', '.join(sorted(unknown))}; the steps are {', '.join(s.name for s in steps)}")
    out, results = options.out or Path(f"gpu_{options.set}.json"), {}
    slower = REDUCED_SLOWER if options.reduced else 1
    for step in steps:
        wanted = step.name not in options.skip and (not options.only or step.name in options.only)
        results[step.name] = run_step(step, task, step.limit_s * slower) if wanted else {"state": "skipped"}
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(
            f"{step.name:<12} {results[step.name]['state']:<10} {results[step.name].get('seconds', 0):>6} s", flush=True
        )
    raise SystemExit(any(result["state"] in ("failed", "timed out") for result in results.values()))


if __name__ == "__main__":
    main()
