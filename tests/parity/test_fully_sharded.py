"""ZeRO levels 2 and 3 match the losses, gradients, norms and weights of one rank in fp64; checkpoints load elsewhere.

Contains the cases that the pairwise coverage of layouts and choices does not include.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch._dynamo

from megastack.assemble.training import build_training
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.testing.compare import Trace
from megastack.testing.ranks import run_ranks
from megastack.testing.training import layout_differences, trace_layout
from tests.parity.cases import LAYOUTS, Changes, configured, dataset

STEPS = 3
TIED: Changes = {"model.tied": True}
FROZEN: Changes = {"optim.freeze": ["^embedding", r"^blocks\.0\."]}
MODELS: dict[str, Changes] = {"plain": {}, "tied": TIED, "frozen": FROZEN}
ALWAYS: Changes = {"parallel.zero.stage": 3, "parallel.zero.gather": "microbatch", "parallel.zero.reduce": "microbatch"}
GATHERS: Changes = {"parallel.zero.stage": 3, "parallel.zero.gather": "microbatch"}
CELLS: dict[str, tuple[str, str, str, Changes]] = {
    "dp4 in shards of 2, recompute": (
        *("dp4", "adamw", "plain"),
        ALWAYS | {"parallel.zero.shard_size": 2, "recompute.mode": "full"},
    ),
    "dp2.pp2": ("dp2.pp2", "sgd", "tied", {"parallel.zero.stage": 2, "parallel.zero.reduce": "microbatch"}),
    "dp2.pp2, first stage frozen": ("dp2.pp2", "adamw", "frozen", GATHERS | {"parallel.layers_per_stage": [1, 3]}),
    "dp2.pp2x2": (
        *("dp2.pp2", "adamw", "plain"),
        ALWAYS | {"schedule.name": "interleaved", "schedule.chunks": 2},
    ),
}


@cache
def reference(optimizer: str, model: str) -> Trace:
    return trace_layout(configured({"optim.name": optimizer}, MODELS[model]), STEPS, dataset=dataset())


@pytest.mark.parametrize("cell", CELLS)
def test_sharding_parameters_does_not_change_training(cell: str) -> None:
    layout, optimizer, model, more = CELLS[cell]
    config = configured({"optim.name": optimizer}, MODELS[model], LAYOUTS[layout], more)
    found = layout_differences(reference(optimizer, model), config, STEPS, dataset=dataset())
    assert not found, "\n".join(map(str, found[:20]))


def test_lower_precision_matches_unsharded_parameters() -> None:
    common: Changes = {"optim.name": "sgd", "precision.compute": "bf16", "model.tied": True}
    unsharded = trace_layout(configured(common, LAYOUTS["dp2"]), STEPS, dataset=dataset())
    for more in (ALWAYS, GATHERS):
        config = configured(common, LAYOUTS["dp2"], more)
        found = layout_differences(unsharded, config, STEPS, dataset=dataset())
        assert not found, "\n".join(map(str, found[:20]))


@pytest.mark.parametrize(("recompute", "compute"), [("none", "fp64"), ("full", "fp64"), ("none", "bf16")])
def test_a_rank_dependent_branch_matches_unsharded_parameters(recompute: str, compute: str) -> None:
    layer = {"model.mlp": {"_target_": "tests.branch_layers.BranchMLP"}, "recompute.mode": recompute}
    layer |= {"precision.compute": compute, "optim.name": "sgd"} if compute == "bf16" else {}
    unsharded = trace_layout(configured(layer, LAYOUTS["dp2"]), STEPS, dataset=dataset())
    for more in (ALWAYS, {"parallel.zero.stage": 2}):
        found = layout_differences(unsharded, configured(layer, LAYOUTS["dp2"], more), STEPS, dataset=dataset())
        assert not found, "\n".join(map(str, found[:20]))


def train_and_save(config: TrainConfig, start: Path | None, steps: int, end: Path) -> None:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh, dataset())
    if start is not None:
        training.restore(start)
    for step in range(steps):
        training.step(step)
    save(end, training.state(), mesh).wait()


def start_from_weights(config: TrainConfig, start: Path) -> bool:
    """Whether model and main parameters equal the weights of the checkpoint after loading only these."""
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh, dataset())
    training.load_weights(start)
    reader = CheckpointReader(start)
    items = training.state().items
    assert any(item.name.startswith("optim/master/") for item in items)
    return all(
        torch.equal(part, reader.read(f"model/{item.name.removeprefix(kind)}")[box.slices].to(part.dtype))
        for item in items
        for kind in ("model/", "optim/master/")
        if item.name.startswith(kind)
        for box, part in item.boxes
    )


def everything(path: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(path)
    return {name: reader.read(name) for name in reader.names}


@pytest.mark.parametrize("compute", ["fp64", "bf16"])
def test_checkpoints_load_with_and_without_sharding(compute: str, tmp_path: Path) -> None:
    common: Changes = {"optim.name": "adamw", "model.tied": True, "precision.compute": compute}
    shards = configured(common, LAYOUTS["dp2"], {"parallel.zero.stage": 3})
    unsharded = configured(common, LAYOUTS["tp2"])
    run_ranks(train_and_save, 2, shards, None, 2, tmp_path / "first")
    run_ranks(train_and_save, 2, unsharded, tmp_path / "first", 0, tmp_path / "second")
    run_ranks(train_and_save, 2, shards, tmp_path / "second", 0, tmp_path / "third")
    first, second, third = (everything(tmp_path / name) for name in ("first", "second", "third"))
    assert any(name.startswith("optim/exp_avg_sq/blocks.3.") for name in first)
    assert any(name.startswith("optim/master/") for name in first) == (compute == "bf16")
    for other in (second, third):
        assert set(first) == set(other)
        unequal = [n for n, x in first.items() if x.dtype != other[n].dtype or not torch.equal(x, other[n])]
        assert not unequal
    if compute == "bf16":
        assert all(run_ranks(start_from_weights, 2, shards, tmp_path / "second"))
