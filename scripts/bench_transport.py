"""Compares shared memory with gloo between CPU ranks of one host: collectives and messages, medians of many repeats.

    python scripts/bench_transport.py            # 2 and 4 ranks, a few minutes on an idle machine

Both transports run in the same processes, in turn. Sizes are those of the unreduced or gathered tensor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from megastack.comm.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from megastack.comm.group import AxisGroup
from megastack.comm.p2p import P2PChannels
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.testing.ranks import run_ranks

WARM_UP = 10


def operations(mesh: Mesh, size_bytes: int) -> dict[str, Callable[[], object]]:
    """The operations on tensors of this size."""
    group: AxisGroup = mesh[Axis.PP]
    whole = torch.randn(size_bytes // 4 // group.size * group.size)
    piece = whole[: whole.numel() // group.size].clone()
    channels = P2PChannels(group, mesh.backward_channels, mesh.device)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def message() -> None:
        received = channels.receive(whole.shape, whole.dtype, before)
        channels.send([whole], after)
        received.wait()
        channels.finish()

    return {
        "all_reduce": lambda: all_reduce(whole, group),
        "all_gather": lambda: all_gather(piece, group),
        "reduce_scatter": lambda: reduce_scatter(whole, group),
        "broadcast": lambda: broadcast(whole, group),
        "message": message,
    }


def measured(size: int, size_bytes: int, repeats: int) -> dict[str, list[float]]:
    """The medians of both transports in seconds, by operation."""
    transports = {name: Mesh.from_environment(MeshShape(pp=size), device="cpu", cpu_transport=name) for name in TURNS}
    running = {name: operations(mesh, size_bytes) for name, mesh in transports.items()}
    found = {}
    for operation in running["gloo"]:
        times: dict[str, list[float]] = {name: [] for name in TURNS}
        for repeat in range(WARM_UP + repeats):
            for name in TURNS:
                begin = time.perf_counter()
                running[name][operation]()
                if repeat >= WARM_UP:
                    times[name].append(time.perf_counter() - begin)
        found[operation] = [statistics.median(times[name]) for name in TURNS]
    return found


TURNS = ("shared_memory", "gloo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="+", default=[1, 256, 65536])
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    for size in options.ranks:
        for kib in options.kib:
            repeats = max(5, options.repeats // max(1, kib // 1024))
            print(f"{size} ranks, {kib:,} KiB, {repeats} repeats")
            for operation, (shared, gloo) in run_ranks(measured, size, size, kib * 1024, repeats, timeout=600)[
                0
            ].items():
                print(f"  {operation:15}{shared * 1e6:12,.0f} us{gloo * 1e6:12,.0f} us with gloo{shared / gloo:8.2f} x")


if __name__ == "__main__":
    main()
