"""The comparison with other systems: the same model on both sides, correct byte counts, figures and tables."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import bench_compile
from bench import measure
from bench.live import LiveBytes
from bench.measure import SIDES, RankRecord
from bench.sides import Megastack, peer
from bench.summary import MARKS, add_ideals, bubble, summarise, text_tables, with_earlier, write_page
from bench.task import LAYOUTS, Layout

from megastack.testing.ranks import run_ranks

KIB = 1024


def test_live_bytes_follow_storages_not_tensors() -> None:
    before = torch.zeros(KIB // 4)
    with LiveBytes() as tensors:
        x = torch.zeros(KIB // 4)
        view = x.view(-1, 2)[1:]
        assert tensors.live == KIB
        before.add_(1)
        assert tensors.live == 2 * KIB, "a storage created outside the mode counts once it is used"
        del x
        assert tensors.live == 2 * KIB, "the view keeps it alive"
        del view
        gc.collect()
        assert tensors.live == KIB
        assert tensors.peak == 2 * KIB
        tensors.restart()
        assert tensors.peak == KIB


def test_live_bytes_include_tensors_of_the_backward_pass() -> None:
    x = torch.zeros(KIB // 4, requires_grad=True)
    with LiveBytes() as tensors:
        (x * 2).sum().backward()
        assert x.grad is not None
        assert tensors.live == 2 * KIB, "the input and its gradient; the product is freed"


def test_live_bytes_follow_storages_that_are_emptied_and_filled() -> None:
    with LiveBytes() as tensors:
        storage = torch.zeros(KIB // 4).untyped_storage()
        storage.resize_(0)
        assert (tensors.live, tensors.peak) == (0, KIB)
        storage.resize_(3 * KIB)
        assert (tensors.live, tensors.peak) == (3 * KIB, 3 * KIB)
        del storage
        gc.collect()
        assert tensors.live == 0


SMALL = ("model.layers=2", "model.hidden=32", "model.ffn=64", "model.vocab=256", "batch.sequence_length=16")


def losses(layout: Layout) -> list[tuple[float, float | None]]:
    ours = Megastack(layout)
    theirs = peer(layout, ours.loader.step)
    found = []
    for number in range(2):
        other = theirs.step(number)
        found.append((float(ours.step(number)), None if other is None else float(other)))
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in ("tp2", "dp2.zero1", "dp2.zero2") else [])
        for name in LAYOUTS
        if name in ("tp2", "pp2") or "zero" in name
    ],
)
def test_both_sides_have_the_same_loss_curve(name: str) -> None:
    layout = replace(LAYOUTS[name], changes=SMALL)
    if not layout.is_available:
        pytest.skip("its peer is not installed")
    ranks = run_ranks(partial(losses, layout), layout.world_size, timeout=240)
    for step in zip(*ranks, strict=True):
        theirs = [other for _, other in step if other is not None]
        assert step[0][0] == pytest.approx(sum(theirs) / len(theirs), abs=1e-5)


def record(ours: float, theirs: float, loss: float | None) -> RankRecord:
    pairs = {"megastack": [ours, ours], "peer": [theirs, theirs]}
    return RankRecord(pairs, pairs, {side: [loss, loss] for side in SIDES}, {"pp": 7 * 2**20})


def test_figures_are_of_the_slowest_rank_and_the_sum_of_cpu_time(tmp_path: Path) -> None:
    peaks, shares = {"megastack": [1, 3], "peer": [4, 2]}, {"products": 0.5}
    single = summarise("single", [record(4, 5, 1.0)], {side: [1] for side in SIDES}, shares)
    result = summarise("pp2", [record(1, 4, None), record(2, 3, 1.5)], peaks, shares)
    add_ideals([single, result], cores=2)
    assert result["median_wall_s"] == {"megastack": 2, "peer": 4}
    assert result["median_cpu_s"] == {"megastack": 3, "peer": 7}
    assert result["wall_ratio"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert result["peak_bytes"] == {"megastack": 3, "peer": 4}
    assert result["losses"]["peer"] == [1.5, 1.5], "the mean is over ranks that have a loss"
    assert bubble("pp2.1f1b") == pytest.approx(1 / 9)
    assert bubble("pp2") == pytest.approx(1 / 25)
    assert result["ideal_wall_s"] == pytest.approx(4 / 2 / (24 / 25))
    page = tmp_path / "page.md"
    page.write_text(f"above\n{MARKS[0]}\nold\n{MARKS[1]}\nbelow\n")
    machine = {"date": "today", "torch": "2", "cores": 2, "processor": "x", "load_before": 0.1, "load_after": 0.2}
    write_page(page, [single, result], machine)
    text = page.read_text()
    assert "old" not in text and text.startswith("above\n") and text.endswith("below\n")
    assert "| pp2 | 1F1B | 2 | 2.00 | 4.00 | 0.50 (0.50-0.50) | 0.96 |" in text
    assert "pp 7" in text_tables([single, result])


def test_pairs_are_measured_in_several_sets_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = list[int]()

    def measured(name: str, pairs: int) -> list[RankRecord]:
        rounds.append(pairs)
        figures = {side: [float(len(rounds))] * pairs for side in SIDES}
        return [RankRecord(figures, figures, {side: [1.0] for side in SIDES}, {"dp": 3})] * 2

    monkeypatch.setattr(measure, "_measure_round", measured)
    first, second = measure.measure_pairs("dp2", 2 * measure.PAIRS_A_ROUND + 1)
    assert rounds == [measure.PAIRS_A_ROUND, measure.PAIRS_A_ROUND, 1]
    assert first == second
    assert first.wall_s["peer"] == [1.0] * rounds[0] + [2.0] * rounds[1] + [3.0]
    assert first.losses["peer"] == [1.0] * 3
    assert first.bytes_by_axis == {"dp": 3}


def test_an_earlier_run_supplies_the_layouts_that_are_not_measured_now(tmp_path: Path) -> None:
    earlier = tmp_path / "before.json"
    earlier.write_text(json.dumps({"results": [{"layout": name, "run": 1} for name in ("single", "tp2", "pp2")]}))
    now = [{"layout": name, "run": 2} for name in ("pp2", "dp2")]
    runs = [(result["layout"], result["run"]) for result in with_earlier(now, earlier)]
    assert runs == [("single", 1), ("dp2", 2), ("tp2", 1), ("pp2", 2)]
    assert [result["layout"] for result in with_earlier(now, None)] == ["dp2", "pp2"]


def test_the_sides_of_the_compiled_blocks_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    order = list[str]()
    sides = {name: lambda number, name=name: order.append(name) for name in ("compiled", "eager", "plain")}
    times, first, losses = bench_compile.measure(sides, 2)
    assert order[:6] == ["compiled", "eager", "plain", "eager", "plain", "compiled"]
    assert [len(taken) for taken in times.values()] == [2, 2, 2] and set(first) == set(sides) and not losses
    bench_compile.report("task", {"compiled": [(1, 1), (2, 3)], "eager": [(2, 4), (4, 12)]}, first)
    assert "compiled / eager, wall: median 0.500" in capsys.readouterr().out
