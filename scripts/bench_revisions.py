"""Processor time of a training step in two checkouts, alternating, to show that a change costs nothing.

    python scripts/bench_revisions.py OLD NEW [--pairs 40] [--steps 25] [--layouts dp2 tp2 pp2]

Each run trains a small Llama through the public API (`compose`, `train`, `Hooks`) with the package of one checkout, and
sums the processor time of all ranks from the end of step 5 to the end of the last step. Runs alternate, and each pair
swaps which checkout goes first. Printed per layout: the median of the ratios NEW / OLD, a 95 % interval of that median
(order statistics), and the smallest and largest ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from math import comb
from pathlib import Path
from typing import Any

FIRST = 5
MODEL = ["model.layers=4", "model.hidden=64", "model.heads=4", "model.ffn=192", "model.vocab=256"]
RUN = ["batch.global_size=8", "batch.micro_size=2", "batch.sequence_length=64", "lr.warmup_steps=0"]
QUIET = ["checkpoint.at_end=false", "observe.tensorboard=false", "run.log_every=1000", "run.validate_every=0"]
LAYOUTS = {"dp2": ["parallel.dp=2"], "tp2": ["parallel.tp=2"], "pp2": ["parallel.pp=2"], "one": []}


def measure(layout: str, steps: int, folder: Path) -> None:
    """Train; every rank writes its processor time after step 5 and after the last."""
    from megastack import Hooks, compose, train

    seen: list[float] = []

    def on_step(row: Any) -> None:
        if row["step"] in (FIRST, steps):
            seen.append(time.process_time())
        if row["step"] == steps:
            (folder / f"{os.getpid()}.json").write_text(json.dumps(seen[-1] - seen[0]))

    overrides = [*MODEL, *RUN, *QUIET, *LAYOUTS[layout], f"run.steps={steps}", f"run.root={folder / 'runs'}"]
    train(compose(overrides), hooks=Hooks(on_step=[on_step]))


def processor_time(checkout: Path, layout: str, steps: int) -> float:
    """Seconds of all ranks together, in a process of its own that imports the package of ``checkout``."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--measure", layout, "--steps", str(steps), "--folder", folder]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        return sum(json.loads(path.read_text()) for path in Path(folder).glob("*.json"))


def interval(ratios: list[float]) -> tuple[float, float]:
    """A confidence interval of at least 95 % of the median: order statistics of the binomial distribution."""
    n, ordered = len(ratios), sorted(ratios)
    below = 0.0
    for rank in range(n // 2 + 1):
        below += comb(n, rank) / 2**n
        if below > 0.025:
            return ordered[max(rank - 1, 0)], ordered[n - max(rank, 1)]
    raise AssertionError("unreachable: the distribution is symmetric")


def compare(old: Path, new: Path, layout: str, pairs: int, steps: int) -> None:
    """Print the ratio of one layout."""
    ratios = []
    for pair in range(pairs):
        order = (old, new) if pair % 2 else (new, old)
        times = {checkout: processor_time(checkout, layout, steps) for checkout in order}
        ratios.append(times[new] / times[old])
    low, high = interval(ratios)
    print(
        f"{layout}: median {statistics.median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}, "
        f"all {min(ratios):.3f} to {max(ratios):.3f}, {pairs} pairs",
        flush=True,
    )


def main() -> None:
    """Parse the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["dp2", "tp2", "pp2"])
    parser.add_argument("--measure", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.steps, options.folder)
        return
    if len(options.checkouts) != 2:
        parser.error("expected two checkouts: OLD NEW")
    for layout in options.layouts:
        compare(*(path.resolve() for path in options.checkouts), layout, options.pairs, options.steps)


if __name__ == "__main__":
    main()
