"""Time of compiled blocks beside eager blocks and plain torch whose blocks are compiled, on one rank of a CPU.

    python scripts/bench_compile.py              # some minutes: the task of bench_layouts.py, and a larger Llama block
    python scripts/bench_compile.py --cold       # with an empty cache of kernels

The sides train the same model from the same initial values on the same batches in one process, one step of each in
turn; which side goes first rotates. Ratios are those of the steps of one turn. Printed for each: the median, a 95 %
interval of it (order statistics), and the smallest and largest ratio, of the wall time and of the processor time. The
second part does the same for forward and backward of one Llama block of hidden 1,024 and 2,048 tokens, in fp32. Exits
with 1 if the losses of the sides differ.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from bench.sides import Megastack  # noqa: E402
from bench.task import LAYOUTS, Layout  # noqa: E402
from bench.torch_side import Torch  # noqa: E402
from bench_revisions import interval  # noqa: E402
from gpu.kernels import PlainBlock  # noqa: E402

from megastack import compose  # noqa: E402
from megastack.assemble.training import build_training  # noqa: E402
from megastack.layers.context import Context  # noqa: E402
from megastack.mesh.mesh import Mesh  # noqa: E402
from megastack.torch_private import compile_cache  # noqa: E402
from megastack.weight_gradients import weight_gradient_scope  # noqa: E402

WARM_UP = 2
LOSS_TOLERANCE = 1e-3
SINGLE = LAYOUTS["single"]
COMPILED = Layout(SINGLE.name, changes=("compile=true",))
HIDDEN, HEADS, GROUPS, FFN, LENGTH = 1024, 16, 4, 2816, 2048
BLOCK = [
    *("model=llama_byte", "model.layers=1", f"model.hidden={HIDDEN}", f"model.heads={HEADS}", f"model.ffn={FFN}"),
    *(f"model.kv_groups={GROUPS}", "batch.global_size=1", "batch.micro_size=1", f"batch.sequence_length={LENGTH}"),
    *("data.document_mask=false", "device=cpu", "run.steps=1"),
]
Side = Callable[[int], Any]
Times = dict[str, list[tuple[float, float]]]


def training_sides() -> dict[str, Side]:
    """The step of each side, on the task of ``bench_layouts.py``."""
    eager, compiled = Megastack(SINGLE), Megastack(COMPILED)
    plain = Torch(SINGLE, eager.loader.step, compiles=True)
    return {"compiled": compiled.step, "eager": eager.step, "plain torch, compiled": plain.step}


def block_sides() -> dict[str, Side]:
    """Forward and backward of one Llama block of each side; the sides have weights of their own."""
    sides: dict[str, Side] = {}
    for name, chosen in {"compiled": ["compile=true"], "eager": []}.items():
        stage = build_training(compose([*BLOCK, *chosen]), Mesh.single()).stages[0]
        own = next(stage.blocks.children())
        run = own if stage.compiled_blocks is None else partial(stage.compiled_blocks, own, 0)
        context = Context.of(torch.arange(LENGTH)[None], rope=stage.rope)
        sides[name] = partial(_pass, partial(_with_context, run, context))
    plain = PlainBlock(HIDDEN, HEADS, GROUPS, FFN)
    angles = torch.randn(LENGTH, HIDDEN // HEADS // 2)
    tables = angles.cos(), angles.sin()
    compiled = torch.compile(plain)
    sides["plain torch, compiled"] = partial(_pass, lambda x: compiled(x, *tables))
    return sides


def _with_context(run: Callable[..., Any], context: Context, x: torch.Tensor) -> Any:
    return run(x, context)


def _pass(run: Callable[[torch.Tensor], torch.Tensor], number: int) -> None:
    x = torch.randn(1, LENGTH, HIDDEN, requires_grad=True)
    with weight_gradient_scope():
        run(x).sum().backward()


def measure(sides: Mapping[str, Side], turns: int) -> tuple[Times, dict[str, float], dict[str, float]]:
    """Wall and processor time of each step, the wall time of the first one, and the last loss, by side."""
    times: Times = {name: [] for name in sides}
    first, losses, names = dict[str, float](), dict[str, float](), list(sides)
    for number in range(WARM_UP + turns):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            wall, cpu = time.perf_counter(), time.process_time()
            loss = sides[name](number)
            taken = time.perf_counter() - wall, time.process_time() - cpu
            first.setdefault(name, taken[0])
            if number >= WARM_UP:
                times[name].append(taken)
            if loss is not None:
                losses[name] = float(loss)
    return times, first, losses


def report(title: str, times: Times, first: Mapping[str, float]) -> None:
    """Print the medians of the sides, and the ratios of the compiled blocks to the others."""
    print(f"{title}\n  {'':24}{'first step s':>13}{'step ms':>10}{'CPU ms':>9}")
    for name, taken in times.items():
        wall, cpu = (statistics.median(each) * 1e3 for each in zip(*taken, strict=True))
        print(f"  {name:24}{first[name]:13.1f}{wall:10.1f}{cpu:9.1f}")
    for name in list(times)[1:]:
        for kind, at in (("wall", 0), ("CPU", 1)):
            pairs = zip(times["compiled"], times[name], strict=True)
            print(f"  compiled / {name}, {kind}: {_spread([ours[at] / theirs[at] for ours, theirs in pairs])}")


def _spread(ratios: list[float]) -> str:
    low, high = interval(ratios)
    return (
        f"median {statistics.median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}, "
        f"all {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs"
    )


def main() -> int:
    """Measure both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="timed steps of each side, after the warm-up")
    parser.add_argument("--cold", action="store_true", help="compile with an empty cache")
    parser.add_argument("--only", choices=("task", "block"), help="measure one part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as empty:
        if options.cold:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty
        print(f"kernels are kept in {compile_cache()}{', which is empty' if options.cold else ''}")
        differ = options.only != "block" and _measure_task(options.pairs)
        if options.only != "task":
            times, first, _ = measure(block_sides(), options.pairs)
            report(f"Llama block, hidden {HIDDEN:,}, {LENGTH:,} tokens, forward and backward", times, first)
    return int(differ)


def _measure_task(turns: int) -> bool:
    """Whether the losses of the sides differ."""
    times, first, losses = measure(training_sides(), turns)
    report("training step of the task of bench_layouts.py", times, first)
    gap = max(losses.values()) - min(losses.values())
    print(f"  losses differ by {gap:.1e}")
    return not gap <= LOSS_TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
