"""Figures from the ranks' records: medians, paired ratios with quartiles, tables for the console and the page."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import SIDES, RankRecord
from bench.task import LAYOUTS, configuration
from megastack.config.layout_rules import mesh_shape
from megastack.models.stages import configured_schedule
from megastack.pipeline.simulate import simulate

MARKS = ("<!-- figures: written by scripts/bench_layouts.py -->", "<!-- end of figures -->")
Rows = Sequence[tuple[str, ...]]
_COLUMNS = (
    *("layout", "peer", "pairs", "step s", "peer s", "ratio (quartiles)", "of ideal", "CPU s", "peer CPU s"),
    *("CPU ratio (quartiles)", "peak MiB", "peer MiB", "MiB sent by axis", "loss differs by"),
)


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def summarise(
    name: str, records: Sequence[RankRecord], peaks: dict[str, list[int]], shares: dict[str, float]
) -> dict[str, Any]:
    """The figures of one layout as JSON.

    The slowest rank determines the time of a step, CPU time is summed over ranks, and peaks are the maximum over ranks.
    Ratios are megastack's figure divided by the peer's, pair by pair.
    """
    layout = LAYOUTS[name]
    wall = {side: _over_ranks(max, [record.wall_s[side] for record in records]) for side in SIDES}
    cpu = {side: _over_ranks(sum, [record.cpu_s[side] for record in records]) for side in SIDES}
    losses = {side: _over_ranks(_mean, [record.losses[side] for record in records]) for side in SIDES}
    gaps = [abs(ours - theirs) for ours, theirs in zip(*losses.values(), strict=True)]
    return {
        "layout": name,
        "peer": layout.blocks,
        "world_size": layout.world_size,
        "bubble": bubble(name),
        "pairs": len(wall["peer"]),
        "wall_s": wall,
        "cpu_s": cpu,
        "median_wall_s": {side: statistics.median(values) for side, values in wall.items()},
        "median_cpu_s": {side: statistics.median(values) for side, values in cpu.items()},
        "wall_ratio": vars(Spread.of(_ratios(wall))),
        "cpu_ratio": vars(Spread.of(_ratios(cpu))),
        "peak_bytes": {side: max(values) for side, values in peaks.items()},
        "peak_bytes_by_rank": peaks,
        "bytes_by_axis": {axis: max(r.bytes_by_axis.get(axis, 0) for r in records) for axis in _axes(records)},
        "shares": shares,
        "losses": losses,
        "largest_loss_difference": max(gaps),
    }


def bubble(name: str) -> float:
    """The idle share of a step of megastack's schedule for equal stages and F = I = W."""
    config = configuration(LAYOUTS[name])
    return simulate(configured_schedule(config, mesh_shape(config))).step_bubble


def add_ideals(results: Sequence[dict[str, Any]], cores: int) -> None:
    """Add the ideal step time: one rank's measured step divided among the cores, without any overhead."""
    single = next((result["median_wall_s"]["megastack"] for result in results if result["layout"] == "single"), None)
    for result in results if single is not None else ():
        result["ideal_wall_s"] = single / min(cores, result["world_size"]) / (1 - result["bubble"])


def with_earlier(results: Sequence[dict[str, Any]], earlier: Path | None) -> list[dict[str, Any]]:
    """These figures, and those of an earlier run's JSON for the other layouts, in the usual order."""
    before = json.loads(earlier.read_text())["results"] if earlier else []
    by_layout = {result["layout"]: result for result in [*before, *results]}
    return [by_layout[name] for name in LAYOUTS if name in by_layout]


def text_tables(results: Sequence[dict[str, Any]]) -> str:
    """The tables for the console."""
    return "\n\n".join(_text(rows) for rows in (_figures(results), _shares(results)))


def _text(rows: Rows) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _markdown(rows: Rows) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *body))


def write_page(page: Path, results: Sequence[dict[str, Any]], machine: dict[str, Any]) -> None:
    """Replace the figures of a page, between two marks."""
    start, end = MARKS
    about = (
        f"{machine['date']}, torch {machine['torch']}, {machine['cores']} cores ({machine['processor']}), "
        f"load average {machine['load_before']:.1f} before and {machine['load_after']:.1f} after."
    )
    shares = "Where megastack's step goes, on the first rank, in percent of its time:"
    tables = f"{_markdown(_figures(results))}\n\n{shares}\n\n{_markdown(_shares(results))}"
    figures = f"{start}\n{about}\n\n{tables}\n{end}"
    text = page.read_text()
    page.write_text(re.sub(f"{re.escape(start)}.*{re.escape(end)}", lambda _: figures, text, flags=re.DOTALL))


def _figures(results: Sequence[dict[str, Any]]) -> Rows:
    return [_COLUMNS, *map(_cells, results)]


def _shares(results: Sequence[dict[str, Any]]) -> Rows:
    rows = [(result["layout"], *(f"{100 * share:.0f}" for share in result["shares"].values())) for result in results]
    return [("layout", *results[0]["shares"]), *rows]


def _cells(result: dict[str, Any]) -> tuple[str, ...]:
    wall, cpu, peak = result["median_wall_s"], result["median_cpu_s"], result["peak_bytes"]
    ideal = result.get("ideal_wall_s")
    sent = ", ".join(f"{axis} {size / 2**20:.3g}" for axis, size in result["bytes_by_axis"].items() if size > 1000)
    return (
        result["layout"],
        result["peer"],
        str(result["pairs"]),
        *(f"{wall[side]:.2f}" for side in SIDES),
        str(Spread(**result["wall_ratio"])),
        f"{wall['megastack'] / ideal:.2f}" if ideal else "-",
        *(f"{cpu[side]:.2f}" for side in SIDES),
        str(Spread(**result["cpu_ratio"])),
        *(f"{peak[side] / 2**20:.1f}" for side in SIDES),
        sent or "-",
        f"{result['largest_loss_difference']:.0e}",
    )


def _over_ranks(join: Callable[..., float], values: Sequence[Sequence[Any]]) -> list[float]:
    return [join(of_step) for of_step in zip(*values, strict=True)]


def _mean(values: Sequence[float | None]) -> float:
    return statistics.fmean(value for value in values if value is not None)


def _ratios(by_side: dict[str, list[float]]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(by_side["megastack"], by_side["peer"], strict=True)]


def _axes(records: Sequence[RankRecord]) -> list[str]:
    return sorted({axis for record in records for axis in record.bytes_by_axis})
