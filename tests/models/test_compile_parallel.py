"""Compiled blocks on every layout: the same numbers, operations and bytes as eager ones, in one order on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megastack.assemble.training import build_training
from megastack.comm.flight_recorder import Operation
from megastack.comm.observer import RankObserver
from megastack.comm.traffic import Traffic
from megastack.config.convert import replace_values
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.models import compile as compiled
from megastack.testing.compare import TOLERANCES, Trace, differences
from megastack.testing.ranks import run_ranks
from megastack.testing.training import composed, trace_training
from tests.tiny_runs import overrides

Operations = list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]
"""Axis, operation, ranks and shape."""


class Recording(RankObserver):
    """Keeps all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Operations = []

    def on_operation(
        self, axis: str, op: str, ranks: tuple[int, ...], shape: tuple[int, ...], payload_bytes: int | None
    ) -> Operation:
        self.operations.append((axis, op, ranks, shape))
        return super().on_operation(axis, op, ranks, shape, payload_bytes)


def trained(config: TrainConfig, steps: int) -> tuple[Trace, Mapping[tuple[str, str], Traffic], Operations]:
    observer = Recording()
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu", observer=observer)
    trace = trace_training(build_training(config, mesh), steps)
    return trace, observer.ledger.records(), observer.operations


def both(config: TrainConfig, backend: str, steps: int) -> tuple[Operations, Operations]:
    """Compare a compiled training with an eager one; returns the operations of both in order, the eager ones first."""
    tolerance = TOLERANCES[torch.float32] if config.precision.compute == "fp32" else 0.05
    with patch.object(compiled, "BACKEND", backend):
        eager, found = (trained(replace_values(config, {"compile": on}), steps) for on in (False, True))
    assert differences(eager[0], found[0], tolerance=tolerance) == []
    if config.recompute.mode == "none":
        assert eager[1] == found[1]
        assert Counter(eager[2]) == Counter(found[2])
    assert not Counter(found[2]) - Counter(eager[2]), "a compiler may repeat fewer operations than eager recompute"
    return eager[2], found[2]


def assert_equal_to_eager(folder: Path, backend: str, steps: int, *layout: str) -> None:
    precise = ["precision=fp32", "optim.name=sgd", "batch.global_size=8", f"run.steps={steps + 1}"]
    config = composed(overrides(folder), precise, "model.dropout=0.1", *layout)
    ranks = run_ranks(both, mesh_shape(config).world_size, config, backend, steps, timeout=1200)
    for eager, found in ranks:
        for other_eager, other_found in ranks:
            same = _on_tp(eager) == _on_tp(other_eager)
            assert same == (_on_tp(found) == _on_tp(other_found)), "another order on another rank"


def _on_tp(operations: Operations) -> Operations:
    return [operation for operation in operations if operation[0] == "tp"]


def split_backward(folder: Path) -> list[str]:
    """A schedule of one rank that computes weight gradients apart from the others."""
    path = folder / "split.csv"
    path.write_text("0F0,0F1,0I0,0I1,0W0,0W1\n")
    return ["schedule=custom", f"schedule.path={path}"]


TP = ["parallel.tp=2"]
SP = [*TP, "parallel.sequence_parallel=true"]


def test_tensor_and_sequence_parallel_blocks_with_deferred_weight_gradients(tmp_path: Path) -> None:
    layer = "model.mlp={_target_: tests.models.collective_layers.CommunicatingMLP}"
    assert_equal_to_eager(tmp_path, "aot_eager", 2, *SP, *split_backward(tmp_path), "batch.micro_size=4", layer)


LAYOUTS = {
    "tp": TP,
    "sp": SP,
    "sp pp": [*SP, "parallel.pp=2"],
    "zb_h1": ["parallel.pp=2", "schedule=zb_h1"],
    "zb_h2 tp": [*TP, "parallel.pp=2", "schedule=zb_h2"],
    "zb_h1 sp dp": [*SP, "parallel.pp=2", "schedule=zb_h1", "parallel.dp=2", "parallel.zero.stage=1"],
    "zero 2": ["parallel.dp=2", "parallel.zero.stage=2"],
    "zero 3 sp": [*SP, "parallel.dp=2", "parallel.zero.stage=3", "parallel.zero.gather=microbatch"],
    "interleaved sp": [*SP, "parallel.pp=2", "schedule=interleaved", "schedule.chunks=2", "model.layers=4"],
}
MODELS = {
    "llama": [],
    "gpt2": ["model.norm=layer", "model.activation=gelu", "model.bias=true", "model.positions=learned"],
    "attention dropout": ["model.attention_dropout=0.1"],
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "model", "recompute", "backend"),
    [*product(LAYOUTS, MODELS, ("none", "selective", "full"), ("aot_eager", "inductor"))],
)
def test_every_layout(layout: str, model: str, recompute: str, backend: str, tmp_path: Path) -> None:
    options = [*LAYOUTS[layout], *MODELS[model], f"recompute.mode={recompute}"]
    assert_equal_to_eager(tmp_path, backend, 2, *options)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zb_h2 tp", "zero 3 sp"])
def test_bf16_with_norms_in_fp32(layout: str, tmp_path: Path) -> None:
    assert_equal_to_eager(tmp_path, "aot_eager", 2, *LAYOUTS[layout], "precision=bf16")
