"""What the comparison with torch's blocks rests on: the same model on both sides, bytes counted rightly."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench.live import LiveBytes
from bench.measure import SIDES, RankRecord
from bench.sides import Megastack, Torch
from bench.summary import MARKS, add_ideals, bubble, summarise, text_tables, write_page
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
        assert tensors.live == 2 * KIB, "a storage made outside counts once it is used"
        del x
        assert tensors.live == 2 * KIB, "the view keeps it"
        del view
        gc.collect()
        assert tensors.live == KIB
        assert tensors.peak == 2 * KIB
        tensors.restart()
        assert tensors.peak == KIB


def test_live_bytes_see_what_backward_makes() -> None:
    x = torch.zeros(KIB // 4, requires_grad=True)
    with LiveBytes() as tensors:
        (x * 2).sum().backward()
        assert x.grad is not None
        assert tensors.live == 2 * KIB, "the input and its gradient; the product is gone"


SMALL = ("model.layers=2", "model.hidden=32", "model.ffn=64", "model.vocab=256", "batch.sequence_length=16")


def losses(layout: Layout) -> list[tuple[float, float | None]]:
    ours = Megastack(layout)
    theirs = Torch(layout, ours.loader.step)
    found = []
    for number in range(2):
        other = theirs.step(number)
        found.append((float(ours.step(number)), None if other is None else float(other)))
    return found


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_both_sides_have_one_loss_curve(name: str) -> None:
    layout = replace(LAYOUTS[name], changes=SMALL)
    for mine, other in run_ranks(losses, layout.world_size, layout)[-1]:
        assert mine == pytest.approx(other, abs=1e-5)


def record(ours: float, theirs: float, loss: float | None) -> RankRecord:
    pairs = {"megastack": [ours, ours], "torch": [theirs, theirs]}
    return RankRecord(pairs, pairs, {side: [loss, loss] for side in SIDES}, {"pp": 7 * 2**20})


def test_figures_are_of_the_slowest_rank_and_the_sum_of_cpu_time(tmp_path: Path) -> None:
    peaks, shares = {"megastack": [1, 3], "torch": [4, 2]}, {"products": 0.5}
    single = summarise("single", [record(4, 5, 1.0)], {side: [1] for side in SIDES}, shares)
    result = summarise("pp2", [record(1, 4, None), record(2, 3, 1.5)], peaks, shares)
    add_ideals([single, result], cores=2)
    assert result["median_wall_s"] == {"megastack": 2, "torch": 4}
    assert result["median_cpu_s"] == {"megastack": 3, "torch": 7}
    assert result["wall_ratio"] == {"median": 0.5, "low": 0.5, "high": 0.5}
    assert result["peak_bytes"] == {"megastack": 3, "torch": 4}
    assert result["losses"]["torch"] == [1.5, 1.5], "ranks without a loss do not enter its mean"
    assert bubble("pp2") == pytest.approx(1 / 9)
    assert result["ideal_wall_s"] == pytest.approx(4 / 2 / (8 / 9))
    page = tmp_path / "page.md"
    page.write_text(f"above\n{MARKS[0]}\nold\n{MARKS[1]}\nbelow\n")
    machine = {"date": "today", "torch": "2", "cores": 2, "processor": "x", "load_before": 0.1, "load_after": 0.2}
    write_page(page, [single, result], machine)
    text = page.read_text()
    assert "old" not in text and text.startswith("above\n") and text.endswith("below\n")
    assert "| pp2 | 1F1B | 2.00 | 4.00 | 0.50 (0.50-0.50) | 0.89 |" in text
    assert "pp 7" in text_tables([single, result])
