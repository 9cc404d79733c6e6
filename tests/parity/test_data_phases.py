"""A run whose data and sequence length change, compared with one rank and with separate runs of each phase."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megastack.assemble.data import read_dataset
from megastack.assemble.training import build_training
from megastack.checkpoint.load import load
from megastack.checkpoint.save import save
from megastack.config.data_schema import DataPhaseOptions
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
def phased(tmp_path: Path) -> Changes:
    """Two phases after the first: longer sequences of the same text, then shorter ones of another text."""
    first, second = corpus(tmp_path, "first", "early"), corpus(tmp_path, "second", "LATE")
    phases = [
        DataPhaseOptions(from_step=1, sequence_length=12),
        DataPhaseOptions(from_step=3, paths=[second], sequence_length=4),
    ]
    return {"data.source": "jsonl", "data.paths": [first], "data.phases": phases, "run.steps": STEPS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_with_phases_is_the_same_on_every_layout(layout: str, phased: Changes) -> None:
    model = FAMILIES["gpt2"] | {"model.max_positions": 12, "model.dropout": 0.1} if layout == "tp2.pp2" else {}
    model = model | phased | {"model.layers": 4}
    alone = configured(model)
    data = read_dataset(alone)
    expected = trace_layout(alone, STEPS, dataset=data)
    found = trace_layout(configured(model, LAYOUTS[layout]), STEPS, dataset=data)
    assert not differences(expected, found, tolerance=TOLERANCES[torch.float64])


def test_a_phase_matches_a_run_on_its_data_alone(phased: Changes, tmp_path: Path) -> None:
    """Three runs without phases; each continues with the weights and moments of the previous one."""
    losses: list[float] = []
    second = phased["data.phases"][1].paths
    runs: list[tuple[int, Changes]] = [
        (1, {"batch.sequence_length": 8}),
        (2, {"batch.sequence_length": 12}),
        (1, {"batch.sequence_length": 4, "data.paths": second}),
    ]
    path = None
    for at, (steps, changes) in enumerate(runs):
        training = build_training(configured({**phased, "data.phases": []}, changes), Mesh.single())
        if path is not None:
            load(path, training.state(), training.mesh)
            training.step.optimizer.load_steps(int(training.step.optimizer.steps))
        losses += [float(training.step(step).loss) for step in range(steps)]
        path = tmp_path / f"step_{at}"
        save(path, training.state(), training.mesh).wait()
    training = build_training(configured(phased), Mesh.single())
    assert [float(training.step(step).loss) for step in range(STEPS)] == losses
