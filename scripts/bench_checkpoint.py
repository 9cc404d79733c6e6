"""Throughput of saving and loading checkpoints, compared with plain files on this machine.

    python scripts/bench_checkpoint.py [--mb 200] [--ranks 1 2] [--repeats 7] [--pairs 20] [--folder DIR] [--json FILE]
    python scripts/bench_checkpoint.py --page           # also writes the table of docs/benchmarks/checkpoints.md

Everything runs in pairs, in alternating order, on the same ranks and bytes: `save` and a plain write + crc32 + fsync of
one file per rank, `load` and a plain read + crc32 of those files. Ratios are plain time / our time, so 1 means equally
fast and more is faster. For the asynchronous save, the time that its caller waits is compared with a copy of the same
bytes into allocated memory: the time of each rank, from a barrier, when nothing is being written. The time to agree on
the plan, mostly one rank waiting for another, is also listed separately. Prints medians and quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megastack import Box, Mesh, MeshShape, SaveHandle, State, StateItem, load, run_ranks, save
from megastack.checkpoint import asynchronous

Times = dict[str, list[float]]
CHUNK = 1 << 20
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "checkpoints.md"
MARKERS = ("<!-- figures: written by scripts/bench_checkpoint.py -->", "<!-- end of figures -->")
KINDS = ("model", "optim/exp_avg", "optim/exp_avg_sq")


def make_state(rank: int, ranks: int, megabytes: int) -> State:
    """Weights and moments as 4 MB matrices, each sharded by rows; ``megabytes`` over all ranks."""
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
                file.readinto(data[start : start + CHUNK])
                crc = zlib.crc32(data[start : start + CHUNK], crc)


def timed(action: Callable[[], object]) -> float:
    """Seconds until all ranks have finished."""
    barrier()
    began = time.perf_counter()
    action()
    barrier()
    return time.perf_counter() - began


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized():
        dist.barrier()


def measure(folder: Path, ranks: int, megabytes: int, repeats: int, pairs: int) -> Times:
    """One rank's times by name, without the first of each."""
    mesh = Mesh.from_environment(MeshShape(dp=ranks))
    times = measure_files(folder, mesh, megabytes, repeats) | measure_calls(folder, mesh, megabytes, pairs)
    return {name: values[1:] for name, values in times.items()}


def measure_files(folder: Path, mesh: Mesh, megabytes: int, repeats: int) -> Times:
    """Times of saving and loading, and of plain files."""
    ranks = mesh.world.size
    state, blank = (make_state(mesh.rank, ranks, megabytes) for _ in range(2))
    path, plain = folder / "step_00000001", folder / f"plain_{mesh.rank}"
    times: Times = {}
    pairs: list[list[tuple[str, Callable[[], object]]]] = [
        [("save", lambda: save(path, state, mesh)), ("plain save", lambda: plain_save(plain, state))],
        [("load", lambda: load(path, blank, mesh)), ("plain load", lambda: plain_load(plain, blank))],
    ]
    for repeat in range(repeats + 1):
        plain.unlink(missing_ok=True)  # both write new files
        shutil.rmtree(path, ignore_errors=True) if mesh.rank == 0 else None
        for pair in pairs:
            for name, action in reversed(pair) if repeat % 2 else pair:
                times.setdefault(name, []).append(timed(action))
        assert all(torch.equal(a.boxes[0][1], b.boxes[0][1]) for a, b in zip(state.items, blank.items, strict=True))
    return times


def measure_calls(folder: Path, mesh: Mesh, megabytes: int, pairs: int) -> Times:
    """Times that the caller of an asynchronous save waits, and of a plain copy, on this rank."""
    state, target = (make_state(mesh.rank, mesh.world.size, megabytes) for _ in range(2))
    times: Times = {name: [] for name in ("copy", "blocked", "agreeing", "published")}

    def plain() -> None:
        barrier()
        began = time.perf_counter()
        copy(target, state)
        times["copy"].append(time.perf_counter() - began)

    def ours() -> None:
        barrier()
        with agreeing() as spent:
            handle = save(folder / "step_00000002", state, mesh, asynchronous=True)
        assert isinstance(handle, SaveHandle)
        handle.wait()
        times["blocked"].append(handle.blocked_s)
        times["agreeing"].append(sum(spent))
        times["published"].append(handle.seconds)

    for number in range(pairs + 1):
        for action in (plain, ours) if number % 2 else (ours, plain):
            action()
    return times


@contextmanager
def agreeing() -> Iterator[list[float]]:
    """Measure the seconds in which the ranks agree whether the last plan is still valid."""
    all_true, spent = asynchronous.all_true, list[float]()

    def timed_all_true(*arguments: Any) -> bool:
        began = time.perf_counter()
        result = all_true(*arguments)
        spent.append(time.perf_counter() - began)
        return result

    with mock.patch.object(asynchronous, "all_true", timed_all_true):
        yield spent


def copy(target: State, state: State) -> None:
    """The part of staging that cannot be avoided."""
    for item, source in zip(target.items, state.items, strict=True):
        item.boxes[0][1].copy_(source.boxes[0][1])


def spread(values: Sequence[float], digits: int) -> str:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(values if len(values) > 1 else [*values, *values], n=4, method="inclusive")
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def differences(first: Sequence[float], *others: Sequence[float]) -> list[float]:
    """Milliseconds of the first minus the others."""
    return [1e3 * (a - sum(rest)) for a, *rest in zip(first, *others, strict=True)]


def figures(by_rank: Sequence[Times], megabytes: int) -> dict[str, str]:
    """The table's rows for one number of ranks; files are complete when the slowest rank has finished."""
    slowest = {name: [max(x) for x in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}
    rows = {}
    for name in ("save", "load"):
        ratios = [b / a for a, b in zip(slowest[name], slowest[f"plain {name}"], strict=True)]
        rate = statistics.median(megabytes / seconds for seconds in slowest[name])
        rows[name] = f"{spread(ratios, 2)} × plain, {rate:,.0f} MB/s"

    def of_ranks(milliseconds: Callable[[Times], list[float]]) -> str:
        return "; ".join(spread(milliseconds(times), 0) for times in by_rank) + " ms"

    rows["asynchronous: caller blocked"] = of_ranks(lambda x: differences(x["blocked"]))
    rows["… beyond a copy into allocated memory"] = of_ranks(lambda x: differences(x["blocked"], x["copy"]))
    rows["… of which agreeing on the plan"] = of_ranks(lambda x: differences(x["agreeing"]))
    rows["… published after"] = f"{spread(slowest['published'], 2)} s"
    return rows


TARGETS = {"save": "≥ 0.8", "load": "≥ 0.6", "… beyond a copy into allocated memory": "≤ 20 ms"}


def table(results: dict[int, dict[str, str]]) -> str:
    """The figures as a Markdown table with one column per number of ranks."""
    heads = ["", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in results), "target"]
    rows = [[name, *(rows[name] for rows in results.values()), TARGETS.get(name, "")] for name in _first(results)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows])


def _first(results: dict[int, dict[str, str]]) -> dict[str, str]:
    return next(iter(results.values()))


def write_page(about: str, text: str) -> None:
    """Replace the figures of the page, between two markers."""
    start, end = MARKERS
    page = PAGE.read_text(encoding="utf-8")
    new = f"{start}\n{about}\n\n{text}\n{end}"
    page = re.sub(f"{re.escape(start)}.*{re.escape(end)}", lambda _: new, page, flags=re.DOTALL)
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description="Throughput of saving and loading checkpoints, compared with plain files."
    )
    parser.add_argument("--mb", type=int, default=200, help="megabytes of state over all ranks (default 200)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default 1 2)")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of saves and of loads (default 7)")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of asynchronous saves and copies (default 20)")
    parser.add_argument("--folder", help="where to write (default: a new temporary folder)")
    parser.add_argument("--json", metavar="FILE", help="also write all times to FILE, by ranks and rank")
    parser.add_argument("--page", action="store_true", help="write the table of docs/benchmarks/checkpoints.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before, results, raw = os.getloadavg()[0], {}, {}
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            arguments = Path(folder), ranks, options.mb, options.repeats, options.pairs
            raw[ranks] = run_ranks(measure, ranks, *arguments, timeout=900)
        results[ranks] = figures(raw[ranks], options.mb)
    about = (
        f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, {platform.system()}, "
        f"{len(os.sched_getaffinity(0))} cores, {options.mb} MB, {options.repeats} pairs of saves and loads, "
        f"{options.pairs} of calls and copies, load average {before:.1f} before and {os.getloadavg()[0]:.1f} after."
    )
    print(about, table(results), sep="\n\n")
    if options.page:
        write_page(about, table(results))
    if options.json:
        Path(options.json).write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
