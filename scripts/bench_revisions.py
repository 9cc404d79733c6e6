"""Processor time of a training step in two checkouts, alternating, to show that a change costs nothing.

    python scripts/bench_revisions.py OLD NEW [--pairs 40] [--steps 5] [--layouts dp2 tp2 pp2]

Both checkouts train the same small Llama through the public API (`compose`, `train`, `Hooks`), each in processes of its
own. One of them runs a block of steps while the other waits, then they change places, and each pair of blocks swaps
which checkout goes first. The processor time of all ranks is summed over a block. Both sides are restarted after
`PAIRS_PER_START` pairs, since the memory that a process happens to get makes all its steps faster or slower. Printed
per layout: the median of the ratios NEW / OLD, a 95 % interval of that median (order statistics), and the smallest and
largest ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from math import comb
from pathlib import Path
from typing import Any

WARM_UP = 5
PAIRS_PER_START = 5
RANKS = 2
POLL_S = 0.01
MODEL = ["model.layers=4", "model.hidden=64", "model.heads=4", "model.ffn=192", "model.vocab=256"]
RUN = ["batch.global_size=8", "batch.micro_size=2", "batch.sequence_length=64", "lr.warmup_steps=0"]
QUIET = ["checkpoint.at_end=false", "observe.tensorboard=false", "run.log_every=1000", "run.validate_every=0"]
LAYOUTS = {"dp2": ["parallel.dp=2"], "tp2": ["parallel.tp=2"], "pp2": ["parallel.pp=2"]}


def measure(layout: str, pairs: int, steps: int, folder: Path) -> None:
    """Train; after the warm-up and after each block every rank writes its time and waits for its next turn."""
    from megastack import Hooks, compose, train

    began = 0.0

    def on_step(row: Any) -> None:
        nonlocal began
        block, rest = divmod(row["step"] - WARM_UP, steps)
        if rest or block < 0:
            return
        seconds = time.process_time() - began
        result = folder / f"{block}.{os.getpid()}"
        result.with_suffix(f"{result.suffix}.part").write_text(str(seconds))
        result.with_suffix(f"{result.suffix}.part").rename(folder / f"{block}.{os.getpid()}.done")
        while block < pairs and not (folder / f"{block}.go").exists():
            time.sleep(POLL_S)
        began = time.process_time()

    overrides = [*MODEL, *RUN, *QUIET, *LAYOUTS[layout]]
    overrides += [f"run.steps={WARM_UP + pairs * steps}", f"run.root={folder / 'runs'}"]
    train(compose(overrides), hooks=Hooks(on_step=[on_step]))


class Side:
    """The training run of one checkout, which pauses between blocks of steps."""

    def __init__(self, checkout: Path, layout: str, pairs: int, steps: int, folder: Path) -> None:
        self._folder, self._block = folder, 0
        numbers = ["--pairs", str(pairs), "--steps", str(steps)]
        command = [sys.executable, __file__, "--measure", layout, *numbers, "--folder", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        with (folder / "output.txt").open("w") as output:
            self._process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder)
        self._times()

    def _times(self) -> list[float]:
        """The processor times of a finished block."""
        while len(done := list(self._folder.glob(f"{self._block}.*.done"))) < RANKS:
            if self._process.poll():
                raise SystemExit((self._folder / "output.txt").read_text())
            time.sleep(POLL_S)
        return [float(path.read_text()) for path in done]

    def block(self) -> float:
        """Let this side run its next block; return the processor seconds of all ranks."""
        (self._folder / f"{self._block}.go").touch()
        self._block += 1
        return sum(self._times())

    def end(self) -> None:
        """Wait until the run has ended."""
        self._process.wait()


def ratios_of(old: Path, new: Path, layout: str, pairs: int, steps: int) -> list[float]:
    """The ratios NEW / OLD of alternating blocks of one pair of runs."""
    with tempfile.TemporaryDirectory() as root:
        sides = {}
        for name, checkout in (("old", old), ("new", new)):
            (Path(root) / name).mkdir()
            sides[name] = Side(checkout, layout, pairs, steps, Path(root) / name)
        found = []
        for pair in range(pairs):
            times = {name: sides[name].block() for name in (("old", "new") if pair % 2 else ("new", "old"))}
            found.append(times["new"] / times["old"])
        for side in sides.values():
            side.end()
        return found


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
    ratios: list[float] = []
    while len(ratios) < pairs:
        ratios += ratios_of(old, new, layout, min(PAIRS_PER_START, pairs - len(ratios)), steps)
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
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--measure", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.pairs, options.steps, options.folder)
        return
    if len(options.checkouts) != 2:
        parser.error("expected two checkouts: OLD NEW")
    for layout in options.layouts:
        compare(*(path.resolve() for path in options.checkouts), layout, options.pairs, options.steps)


if __name__ == "__main__":
    main()
