"""A run whose data and sequence length change on the way, against one rank, and against runs of one stage each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megastack.assemble.data import read_dataset
from megastack.assemble.training import build_training
from megastack.checkpoint.load import load
from megastack.checkpoint.save import save
from megastack.config.schema import DataPhaseOptions
from megastack.mesh.mesh import Mesh
from megastack.testing.compare import TOLERANCES, differences
from megastack.testing.training import trace_layout
from tests.parity.cases import FAMILIES, Changes, configured

STEPS = 4
LAYOUTS: dict[str, Changes] = {
    "tp2.pp2": {"parallel.tp": 2, "parallel.pp": 2},
    "dp2.pp2x2.zero1.recomputed": {
        "parallel.dp": 2,
        "parallel.pp": 2,
        "parallel.zero.stage": 1,
        "recompute.mode": "full",
        "schedule.name": "interleaved",
        "schedule.chunks": 2,
    },
}


def corpus(folder: Path, name: str, word: str, documents: int = 60) -> str:
    path = folder / f"{name}.jsonl"
    lines = [json.dumps({"text": f"{word} {n} " * (1 + n % 4)}) + "\n" for n in range(documents)]
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture
def staged(tmp_path: Path) -> Changes:
    """Two stages after the first: a longer sequence of the same text, then a shorter one of another."""
    first, second = corpus(tmp_path, "first", "early"), corpus(tmp_path, "second", "LATE")
    stages = [
        DataPhaseOptions(from_step=1, sequence_length=12),
        DataPhaseOptions(from_step=3, paths=[second], sequence_length=4),
    ]
    return {"data.source": "jsonl", "data.paths": [first], "data.phases": stages, "run.steps": STEPS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_staged_run_is_the_same_on_every_layout(layout: str, staged: Changes) -> None:
    model = FAMILIES["gpt2"] | {"model.max_positions": 12, "model.dropout": 0.1} if layout == "tp2.pp2" else {}
    model = model | staged | {"model.layers": 4}
    alone = configured(model)
    data = read_dataset(alone)
    expected = trace_layout(alone, STEPS, dataset=data)
    found = trace_layout(configured(model, LAYOUTS[layout]), STEPS, dataset=data)
    assert not differences(expected, found, tolerance=TOLERANCES[torch.float64])


def test_a_stage_is_a_run_on_its_own_data_from_its_first_sample_on(staged: Changes, tmp_path: Path) -> None:
    """Three runs without stages, each going on with the weights and moments of the one before."""
    losses: list[float] = []
    second = staged["data.phases"][1].paths
    cuts: list[tuple[int, Changes]] = [
        (1, {"batch.sequence_length": 8}),
        (2, {"batch.sequence_length": 12}),
        (1, {"batch.sequence_length": 4, "data.paths": second}),
    ]
    path = None
    for at, (steps, changes) in enumerate(cuts):
        training = build_training(configured({**staged, "data.phases": []}, changes), Mesh.single())
        if path is not None:
            load(path, training.state(), training.mesh)
            training.step.optimizer.load_steps(int(training.step.optimizer.steps))
        losses += [float(training.step(step).loss) for step in range(steps)]
        path = tmp_path / f"step_{at}"
        save(path, training.state(), training.mesh).wait()
    training = build_training(configured(staged), Mesh.single())
    assert [float(training.step(step).loss) for step in range(STEPS)] == losses
