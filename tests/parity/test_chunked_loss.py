"""Training with head and loss in chunks of tokens matches one rank with whole logits, on every kind of layout."""

from __future__ import annotations

import pytest
import torch

from megastack.assemble.training import build_training
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.mesh.mesh import Mesh
from megastack.testing.compare import TOLERANCES, Trace, differences
from megastack.testing.ranks import run_ranks
from megastack.testing.training import trace_layout, trace_training
from tests.models.chunks import chunks_of
from tests.parity.cases import LAYOUTS, ZERO, Changes, configured, dataset

STEPS = 2
SCHEDULE = "schedule.name"
CASES: dict[str, tuple[Changes, Changes]] = {
    "sequence parallel, interleaved": ({}, LAYOUTS["tp2.pp2"] | {SCHEDULE: "interleaved", "schedule.chunks": 2}),
    "no sequence parallel, tied, zb_h1": (
        {"model.tied": True},
        LAYOUTS["tp2.pp2"] | {SCHEDULE: "zb_h1", "parallel.sequence_parallel": False},
    ),
    "ZeRO-1, gpipe": ({}, {"parallel.dp": 2, "parallel.pp": 2, SCHEDULE: "gpipe"} | ZERO["1"]),
    "ZeRO-3, tied": ({"model.tied": True}, LAYOUTS["dp2"] | ZERO["3"]),
}


def trace_chunks(config: TrainConfig, data: Dataset) -> Trace | None:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    with chunks_of(6):
        trace = trace_training(build_training(config, mesh, data), STEPS)
    return trace if mesh.rank == 0 else None


@pytest.mark.parametrize("case", CASES)
def test_training_in_chunks_matches_whole_logits_on_one_rank(case: str) -> None:
    model, layout = CASES[case]
    model = model | {"loss.label_smoothing": 0.1, "loss.z_loss": 0.01}
    expected = trace_layout(configured(model, {"loss.chunked": False}), STEPS, dataset=dataset())
    config = configured(model, layout)
    found = run_ranks(trace_chunks, mesh_shape(config).world_size, config, dataset())[0]
    assert found is not None
    wrong = differences(expected, found, tolerance=TOLERANCES[torch.float64])
    assert not wrong, "\n".join(map(str, wrong[:20]))
