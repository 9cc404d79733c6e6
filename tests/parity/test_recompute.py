"""Training with and without recompute on the same layout is the same to the last bit, dropout and all."""

from __future__ import annotations

import pytest
import torch

from megastack.testing.compare import Trace
from megastack.testing.training import trace_layout
from tests.parity.cases import LAYOUTS, configured, dataset

DROPS = {"model.layers": 4, "model.tied": True, "model.dropout": 0.5, "optim.name": "adamw"}
RUNS = {
    "tp2": [("full", None), ("selective", None)],
    "tp2.pp2": [("full", None), ("pattern", r"blocks\.(0|3)")],
}


def traced(layout: str, mode: str, pattern: str | None) -> Trace:
    how = {"recompute.mode": mode, "recompute.pattern": pattern, "model.attention_dropout": 0.5}
    return trace_layout(configured(LAYOUTS[layout], DROPS, how), 3, dataset=dataset())


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.full] if layout == "tp2.pp2" else []) for layout in RUNS]
)
def test_three_steps_are_the_same_to_the_last_bit(layout: str) -> None:
    expected = traced(layout, "none", None)
    for mode, pattern in RUNS[layout]:
        found = traced(layout, mode, pattern)
        assert (found.losses, found.norms) == (expected.losses, expected.norms)
        for what in ("gradients", "weights"):
            for here, there in zip(getattr(found, what), getattr(expected, what), strict=True):
                assert here.keys() == there.keys()
                assert not [name for name in here if not torch.equal(here[name], there[name])]
    assert len(expected.losses) == len(expected.gradients) == 3
