"""Compare the default number of CPU threads with one: ``python scripts/bench_threads.py``, on an idle machine.

Two figures, each a ratio of step times, default over ``launch.threads_per_rank=1``:

- *busy*: with one busy process per CPU, for a small and a wide model; the target is at most 1.2;
- *idle*: with hidden 1,024 and an idle machine; the target is at most 0.75 on two CPUs or more.

Runs of both sides alternate, so that other load on the machine affects both. Prints the median ratio of the rounds with
the smallest and the largest, and the choice of threads from the ranks' logs. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2
WIDE = ("model.hidden=1024", "model.ffn=3072", "model.heads=8", "model.layers=2", "batch.global_size=4")
FIGURES = {
    "busy, llama_tiny": (("model=llama_tiny",), True, 1.2),
    "busy, hidden 1024": (WIDE, True, 1.2),
    "idle, hidden 1024": (WIDE, False, 0.75),
}
QUIET = ("checkpoint.at_end=false", "run.validate_every=0", "data.validation_fraction=0", "observe.tensorboard=false")
CHOSEN = re.compile(r"\d+ threads? \(.*\)")


def main() -> int:
    """Measure the selected figures one after another."""
    options = _options()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment["PYTHONPATH"] = str(ROOT)
    cpus, missed = len(os.sched_getaffinity(0)), False
    print(f"{cpus} CPUs, load {os.getloadavg()[0]:.1f} before the first run, {options.steps} steps a run")
    for name in options.figures or FIGURES:
        overrides, busy, target = FIGURES[name]
        with _busy(cpus if busy else 0):
            ratios = [_round(name, overrides, options.steps, environment) for _ in range(options.rounds)]
        ratio = statistics.median(ratios)
        missed |= ratio > target
        print(f"{name}: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), target at most {target}", flush=True)
    return int(missed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], metavar="FIGURE", help=f"of {list(FIGURES)}")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a run, after the warm-up")
    return parser.parse_args()


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """A context with ``count`` busy processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _round(name: str, overrides: tuple[str, ...], steps: int, environment: dict[str, str]) -> float:
    chosen, default = _run(overrides, steps, environment)
    _, one = _run((*overrides, "launch.threads_per_rank=1"), steps, environment)
    print(f"  {name}: default {default * 1e3:.1f} ms with {chosen}, one thread {one * 1e3:.1f} ms", flush=True)
    return default / one


def _run(overrides: tuple[str, ...], steps: int, environment: dict[str, str]) -> tuple[str, float]:
    """The choice of threads of a run, as logged, and its median step time."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "megastack.cli", "train", *overrides, *QUIET]
        command += [f"run.dir={run}", f"run.steps={WARM_UP + steps}"]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        times = [row["step_time_s"] for row in rows if row["kind"] == "train"][WARM_UP:]
        found = CHOSEN.search((run / "logs" / "rank_00000.log").read_text())
        assert found is not None
        return found[0], statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
