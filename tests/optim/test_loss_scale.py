"""The loss scale adapts identically on all ranks and leaves gradients and weights unchanged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megastack.gradients.buckets import GradientBuckets
from megastack.mesh.mesh import Mesh
from megastack.optim.loss_scale import HIGHEST, LOWEST, LossScale
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement
from tests.tiny_runs import events, rows, status, train

GOOD, BAD = torch.zeros(()), torch.ones(())


class One(ParallelModule):
    """A single weight."""

    def __init__(self) -> None:
        super().__init__(Mesh.single())
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"weight": Placement((2,), init=Ones())}


def test_a_skipped_step_halves_it_and_a_run_of_good_ones_doubles_it() -> None:
    scale = LossScale(1024.0, dynamic=True, interval=3)
    seen = []
    for found_inf in (GOOD, GOOD, BAD, GOOD, GOOD, GOOD, GOOD):
        scale.update(found_inf)
        seen.append((scale.value.item(), scale.good_steps.item()))
    assert seen == [(1024, 1), (1024, 2), (512, 0), (512, 1), (512, 2), (1024, 0), (1024, 1)]


def test_it_stays_within_its_bounds() -> None:
    low, high = LossScale(LOWEST, dynamic=True), LossScale(HIGHEST, dynamic=True, interval=1)
    low.update(BAD)
    high.update(GOOD)
    assert (low.value.item(), high.value.item()) == (LOWEST, HIGHEST)
    assert not low.may_overflow(low.value.item()) and high.may_overflow(high.value.item())


def test_gradients_are_divided_by_it() -> None:
    model, scale = One(), LossScale(256.0)
    buckets = GradientBuckets([model], model.mesh)
    (model.weight.sum() * 3.0 * scale.value).backward()
    buckets.finish()
    scale.unscale_(buckets)
    assert dict(buckets.named_gradients())["weight"].tolist() == [3.0, 3.0]


def test_a_fixed_scale_and_none_do_not_adapt_and_have_no_state() -> None:
    for scale in (LossScale(8.0), LossScale()):
        scale.update(BAD)
        assert scale.state() == {} and not scale.may_overflow(8.0)
    assert LossScale().value is None and LossScale(8.0).value is not None


def test_its_state_is_loaded_in_place() -> None:
    scale = LossScale(1024.0, dynamic=True)
    for name, value in {"scale": 32.0, "good_steps": 7}.items():
        scale.state()[name].fill_(value)
    scale.update(BAD)
    assert (scale.value.item(), scale.good_steps.item()) == (16.0, 0)


def test_an_overflow_of_a_run_is_skipped_until_the_scale_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megastack.assemble.optimizer.INITIAL", 2.0**27)
    assert train(tmp_path, "precision=fp16", "run.steps=10", "run.validate_every=0", "checkpoint.at_end=false") == 0
    run = tmp_path / "run"
    steps = rows(run)
    skipped = steps[-1]["skipped"]
    assert 0 < skipped < 10 and status(run)["status"] == "completed"
    assert [row["loss_scale"] for row in steps[: skipped + 1]] == [2.0 ** (27 - at) for at in range(skipped + 1)]
    assert all(row["grad_norm"] is None for row in steps[:skipped])
    assert all(math.isfinite(row["grad_norm"]) for row in steps[skipped:])
    assert sum(event["name"] == "nonfinite" for event in events(run)) == skipped
