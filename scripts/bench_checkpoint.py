"""How fast checkpoints are saved and loaded, against the plainest thing that could be right, on this machine.

    python scripts/bench_checkpoint.py [--mb 200] [--ranks 2] [--repeats 7] [--folder DIR] [--json FILE]

Each repeat runs in pairs, in alternating order, on the same ranks and bytes: `save` beside a plain write + crc32 +
fsync of one file a rank, `load` beside a plain read + crc32 of those files. Ratios are plain time / our time, so 1 is
as fast and more is faster; the median and the range of the paired ratios are printed. The asynchronous save is measured
by what its caller waits for, beside a copy of the same bytes into memory that is already there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megastack import Box, Mesh, MeshShape, SaveHandle, State, StateItem, load, run_ranks, save

CHUNK = 1 << 20
KINDS = ("model", "optim/exp_avg", "optim/exp_avg_sq")


def make_state(rank: int, ranks: int, megabytes: int) -> State:
    """Weights and moments of layers of 4 MB matrices, each cut by rows; ``megabytes`` over all ranks."""
    rows, columns = 1024 // ranks, 1024
    items = []
    for number in range(max(1, megabytes // 4)):
        name, part = f"{KINDS[number % 3]}/blocks.{number // 3}.weight", torch.randn(rows, columns)
        items.append(StateItem(name, (rows * ranks, columns), ((Box((rank * rows, 0), (rows, columns)), part),)))
    return State(items, {"step": 1})


def plain_save(path: Path, state: State) -> None:
    """Write every tensor in turn with its checksum, then fsync."""
    crc = 0
    with open(path, "wb", buffering=0) as file:
        for item in state.items:
            data = item.boxes[0][1].view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK):
                crc = zlib.crc32(data[start : start + CHUNK], crc)
                file.write(data[start : start + CHUNK])
        os.fsync(file.fileno())


def plain_load(path: Path, state: State) -> None:
    """Read every tensor in turn with its checksum."""
    crc = 0
    with open(path, "rb", buffering=0) as file:
        for item in state.items:
            data = item.boxes[0][1].view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK):
                file.readinto(data[start : start + CHUNK])  # type: ignore[attr-defined]
                crc = zlib.crc32(data[start : start + CHUNK], crc)


def timed(action: Callable[[], object]) -> tuple[float, object]:
    """Seconds until all ranks are through, and what the action returned."""
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    result = action()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - began, result


def measure(folder: Path, ranks: int, megabytes: int, repeats: int) -> dict[str, list[float]]:
    """One rank's times by name; the first repeat is not kept."""
    mesh = Mesh.from_environment(MeshShape(dp=ranks))
    state, blank, room = (make_state(mesh.rank, ranks, megabytes) for _ in range(3))
    path, plain = folder / "step_00000001", folder / f"plain_{mesh.rank}"
    times: dict[str, list[float]] = {}
    pairs: list[list[tuple[str, Callable[[], object]]]] = [
        [("save", lambda: save(path, state, mesh)), ("plain save", lambda: plain_save(plain, state))],
        [("load", lambda: load(path, blank, mesh)), ("plain load", lambda: plain_load(plain, blank))],
        [
            ("copy", lambda: copy(room, state)),
            ("held up", lambda: save(folder / "step_00000002", state, mesh, asynchronous=True)),
        ],
    ]
    for repeat in range(repeats + 1):
        for pair in pairs:
            if pair is pairs[0]:  # both write into an empty place
                plain.unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True) if mesh.rank == 0 else None
            for name, action in reversed(pair) if repeat % 2 else pair:
                seconds, result = timed(action)
                if name == "held up":
                    assert isinstance(result, SaveHandle)
                    result.wait()
                    seconds = result.held_up_s
                    times.setdefault("published", []).append(result.seconds)
                times.setdefault(name, []).append(seconds)
        assert all(torch.equal(a.boxes[0][1], b.boxes[0][1]) for a, b in zip(state.items, blank.items, strict=True))
    return {name: values[1:] for name, values in times.items()}


def copy(room: State, state: State) -> None:
    """What staging cannot do without."""
    for target, source in zip(room.items, state.items, strict=True):
        target.boxes[0][1].copy_(source.boxes[0][1])


def said(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def report(times: dict[str, list[float]], megabytes: int) -> None:
    """Print what the times of one number of ranks say."""
    for name in ("save", "load"):
        ratios = [b / a for a, b in zip(times[name], times[f"plain {name}"], strict=True)]
        rate = statistics.median(megabytes / seconds for seconds in times[name])
        print(f"  {name}: {said(ratios)} × plain; {rate:,.0f} MB/s; plain {said(times[f'plain {name}'])} s")
    extra = [1e3 * (a - b) for a, b in zip(times["held up"], times["copy"], strict=True)]
    print(f"  asynchronous: held up {said([1e3 * x for x in times['held up']])} ms, beyond a copy {said(extra)} ms")
    print(f"  asynchronous: published after {said(times['published'])} s")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Save and load rates of checkpoints, beside plain files.")
    parser.add_argument("--mb", type=int, default=200, help="megabytes of state over all ranks (default 200)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of each kind (default 7)")
    parser.add_argument("--folder", help="where to write (default: a new temporary folder)")
    parser.add_argument("--json", metavar="FILE", help="also write all times to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            by_rank = run_ranks(measure, ranks, Path(folder), ranks, options.mb, options.repeats, timeout=900)
        slowest = {name: [max(x) for x in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}
        results[ranks] = slowest
        print(f"{ranks} ranks, {options.mb} MB, {options.repeats} pairs; median (range)")
        report(slowest, options.mb)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
