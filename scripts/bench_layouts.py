"""Compare megastack with torch and DeepSpeed, layout by layout: ``python scripts/bench_layouts.py --page``.

Both sides train the same model from the same initial values on the same batches, step by step in turn, so that other
load on the machine affects both; their losses are compared. Prints a table, writes all figures as JSON and, with
``--page``, updates the table of ``docs/benchmarks/layouts.md``, which explains them. Exits with 1 if the losses differ.
Comparisons with DeepSpeed need the package ``deepspeed`` and are skipped without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from bench.measure import limit_threads, measure_pairs, measure_peaks  # noqa: E402
from bench.shares import measure_shares  # noqa: E402
from bench.summary import add_ideals, summarise, text_tables, with_earlier, write_page  # noqa: E402
from bench.task import LAYOUTS  # noqa: E402

LOSS_TOLERANCE = 1e-4


def main() -> int:
    """Measure the selected layouts one after another."""
    options = _options()
    limit_threads()
    before, results = os.getloadavg()[0], []
    for name in options.layouts:
        print(f"{name} …", file=sys.stderr, flush=True)
        records = measure_pairs(name, options.pairs)
        results.append(summarise(name, records, measure_peaks(name), measure_shares(name)))
    cores = len(os.sched_getaffinity(0))
    add_ideals(results, cores)
    results = with_earlier(results, options.earlier)
    machine = _machine(cores, before)
    print(text_tables(results))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    if options.page:
        write_page(ROOT / "docs" / "benchmarks" / "layouts.md", results, machine)
    wrong = [r["layout"] for r in results if not r["largest_loss_difference"] <= LOSS_TOLERANCE]
    if wrong:
        print(f"losses differ by more than {LOSS_TOLERANCE:g} on {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available = [name for name, layout in LAYOUTS.items() if layout.is_available]
    parser.add_argument("layouts", nargs="*", default=available, metavar="LAYOUT", help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--pairs", type=int, default=10, help="timed steps of each side, after the warm-up")
    parser.add_argument("--json", type=Path, default=Path("outputs/bench_layouts.json"), help="file for the figures")
    parser.add_argument("--earlier", type=Path, help="figures of an earlier run, for layouts that are not measured now")
    parser.add_argument("--page", action="store_true", help="update docs/benchmarks/layouts.md")
    options = parser.parse_args()
    if unknown := set(options.layouts) - set(LAYOUTS):
        parser.error(f"unknown layout {', '.join(sorted(unknown))}; use {', '.join(LAYOUTS)}")
    if missing := [name for name in options.layouts if name not in available]:
        parser.error(f"{', '.join(missing)}: needs the package deepspeed; use {', '.join(available)}")
    return options


def _machine(cores: int, load_before: float) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": cores,
        "processor": _processor(),
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }


def _processor() -> str:
    """The name of the processor, if known."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
