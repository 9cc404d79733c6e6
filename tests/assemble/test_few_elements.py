"""Dumps and checkpoints with ranks that hold no part of a parameter, empty parameters, and empty stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megastack.assemble.loop import _dumper
from megastack.checkpoint.save import save
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.observe.folder import RunFolder
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.model import check_mesh, check_model
from megastack.testing.ranks import run_ranks
from megastack.testing.training import composed
from tests.assemble.test_training import built, everything
from tests.tiny_runs import overrides

ODD = ["model.mlp={_target_: tests.odd_layers.OddMLP}"]
PADDED = ["model.vocab_multiple=1024", "model.heads=4", "model.kv_groups=4"]
PLAIN = ["model.layers=3", "model.block={_target_: tests.odd_layers.PlainBlock}"]
THREE = ["parallel.pp=3", "parallel.layers_per_stage=[1,1,1]"]
CASES: dict[str, tuple[list[str], list[str]]] = {
    "only padding": (PADDED, ["parallel.tp=4"]),
    "only padding, ZeRO 1": (PADDED, ["parallel.tp=4", "parallel.dp=2", "parallel.zero.stage=1"]),
    "only padding, ZeRO 3": (PADDED, ["parallel.tp=4", "parallel.dp=2", "parallel.zero.stage=3"]),
    "few elements": (ODD, ["parallel.dp=4"]),
    "few elements, ZeRO 1": (ODD, ["parallel.dp=4", "parallel.zero.stage=1"]),
    "few elements, ZeRO 3": (ODD, ["parallel.dp=4", "parallel.zero.stage=3"]),
    "few elements in shards of 2": (ODD, ["parallel.dp=4", "parallel.zero.stage=2", "parallel.zero.shard_size=2"]),
    "no parameters": (PLAIN, THREE),
    "no parameters, ZeRO 3": (PLAIN, [*THREE, "parallel.dp=2", "parallel.zero.stage=3"]),
    "only the embedding": ([], ["parallel.pp=2", "parallel.layers_per_stage=[0,2]", "parallel.dp=2"]),
    "a frozen stage": (
        ["optim.freeze=[embedding,blocks.0]"],
        ["parallel.pp=2", "parallel.dp=2", "parallel.zero.stage=2"],
    ),
}


def configured(folder: Path, *more: list[str]) -> TrainConfig:
    return composed(overrides(folder), "run.steps=4", "optim.name=sgd", "optim.momentum=0.9", "optim.lr=0.1", *more)


def dumped(config: TrainConfig, folder: Path) -> Any:
    """Two steps, the second one dumped; then save, and restore in another training; the states of both."""
    training = built(config)
    dump = _dumper(training, RunFolder(folder))
    training.step(0)
    training.step(1, lambda: dump(2, "gradients"))
    dump(2, "weights")
    save(folder / "step_00000002", training.state(), training.mesh).wait()
    other = built(config)
    other.restore(folder / "step_00000002")
    return everything(training), everything(other)


@pytest.mark.parametrize("case", CASES)
def test_dumps_equal_those_of_one_rank_and_checkpoints_restore_the_state(case: str, tmp_path: Path) -> None:
    model, layout = CASES[case]
    single, other = (configured(tmp_path, model, more) for more in ([], layout))
    run_ranks(dumped, 1, single, tmp_path / "single")
    saved, loaded = run_ranks(dumped, mesh_shape(other).world_size, other, tmp_path / "other")[0]
    assert saved.keys() == loaded.keys() and all(torch.equal(loaded[name], x) for name, x in saved.items())
    expected, found = (load_file(RunFolder(tmp_path / name).dump(2)) for name in ("single", "other"))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-9, atol=1e-12, msg=name)


def test_a_scalar_that_cannot_be_sharded_is_reported_before_launch(tmp_path: Path) -> None:
    layer = ["model.mlp={_target_: tests.odd_layers.ScalarMLP}", "parallel.dp=2"]
    for more, expected in ((["parallel.zero.stage=1"], 0), (["parallel.zero.stage=3"], 1)):
        errors = ErrorCollector()
        config = configured(tmp_path, layer, more)
        check_model(config, errors, check_mesh(config, errors))
        assert len(errors.found) == expected
    assert str(errors.found[0]) == (
        "parallel.zero.stage=3: blocks.0.mlp.scale, blocks.1.mlp.scale: a scalar cannot be cut over data ranks; "
        "use 0, 1 or declare it with shape (1,)"
    )
