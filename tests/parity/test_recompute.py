"""Training with and without recomputation on the same layout is bitwise identical, including dropout."""

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
    changes = {"recompute.mode": mode, "recompute.pattern": pattern, "model.attention_dropout": 0.5}
    return trace_layout(configured(LAYOUTS[layout], DROPS, changes), 3, dataset=dataset())


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.full] if layout == "tp2.pp2" else []) for layout in RUNS]
)
def test_three_steps_are_bitwise_identical(layout: str) -> None:
    expected = traced(layout, "none", None)
    for mode, pattern in RUNS[layout]:
        found = traced(layout, mode, pattern)
        assert (found.losses, found.norms) == (expected.losses, expected.norms)
        for name_of_values in ("gradients", "weights"):
            for here, there in zip(getattr(found, name_of_values), getattr(expected, name_of_values), strict=True):
                assert here.keys() == there.keys()
                assert not [name for name in here if not torch.equal(here[name], there[name])]
    assert len(expected.losses) == len(expected.gradients) == 3
