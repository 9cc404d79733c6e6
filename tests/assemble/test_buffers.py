"""Persistent buffers of a user's layer are training state: saved, resumed bitwise, moved to other layouts, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megastack.assemble.stages import load_stages
from megastack.assemble.training import Training, build_training
from megastack.checkpoint.load import load
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.errors import CheckpointError, ConfigError
from megastack.mesh.mesh import Mesh
from megastack.models.stages import configured_schedule
from megastack.placement.buffers import persistent_buffers
from megastack.preflight.checkpoint import check_fit
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.model import check_model
from megastack.testing.ranks import run_ranks
from megastack.testing.training import composed
from tests.assemble.test_training import built, everything, run
from tests.tiny_runs import overrides

NAMES = {f"model/blocks.{layer}.mlp.{name}" for layer in (0, 1) for name in ("mean", "count", "seen", "level", "gain")}


def target(name: str) -> str:
    return f"model.mlp={{_target_: tests.buffer_layers.{name}}}"


def tracking(folder: Path, *more: str, layer: str = "TrackingMLP") -> TrainConfig:
    choices = ["run.steps=6", "optim.name=adamw", "optim.lr=0.01", "precision=fp32", "batch.global_size=8"]
    return composed(overrides(folder), choices, "parallel.sequence_parallel=false", target(layer), *more)


def steps_of(config: TrainConfig, first: int, last: int, start: str | None, end: str | None) -> Any:
    training = built(config)
    if start is not None:
        training.restore(Path(start))
    losses = run(training, range(first, last))
    if end is not None:
        save(end, training.state(), training.mesh).wait()
    return losses, everything(training)


def continued(config: TrainConfig, first: int, last: int, start: str | None = None, end: str | None = None) -> Any:
    return run_ranks(steps_of, mesh_shape(config).world_size, config, first, last, start, end)[0]


LAYOUTS = {
    "one rank": [],
    "bf16, recomputed": ["precision=bf16", "recompute.mode=full"],
    "dp2 tp2, ZeRO 1": ["parallel.dp=2", "parallel.tp=2", "parallel.zero.stage=1"],
    "dp2 pp2, ZeRO 3": ["parallel.dp=2", "parallel.pp=2", "parallel.zero.stage=3", "recompute.mode=full"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_equals_an_uninterrupted_one_bitwise(layout: str, tmp_path: Path) -> None:
    path, config = str(tmp_path / "step_00000002"), tracking(tmp_path, *LAYOUTS[layout])
    uninterrupted, expected = continued(config, 0, 4)
    first, _ = continued(config, 0, 2, end=path)
    second, found = continued(config, 2, 4, start=path)
    assert first + second == uninterrupted
    assert found.keys() == expected.keys() and set(expected) >= NAMES
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    microbatches = 8 // mesh_shape(config).dp
    assert {int(expected[name]) for name in NAMES if name.endswith("count")} == {4 * microbatches}
    reader = CheckpointReader(path)
    assert set(reader.names) >= NAMES and not any("scratch" in name for name in reader.names)
    kinds = {reader.dtype(name) for name in NAMES if "mean" in name or "level" in name}
    assert kinds == {torch.float32}


def buffers_after_load(config: TrainConfig, path: str) -> dict[str, Tensor]:
    """Restore a checkpoint on another layout and save it again; this rank's buffers."""
    training = built(config)
    training.restore(Path(path))
    save(f"{path}0", training.state(), training.mesh).wait()
    return {name: buffer.clone() for stage in training.stages for name, buffer in persistent_buffers(stage).items()}


def test_buffers_move_to_any_layout(tmp_path: Path) -> None:
    path = str(tmp_path / "step_00000001")
    _, expected = continued(tracking(tmp_path, "parallel.dp=2", "parallel.tp=2"), 0, 1, end=path)
    for layout in ([], ["parallel.pp=2", "parallel.tp=2"], ["parallel.dp=2", "parallel.zero.stage=3"]):
        config = tracking(tmp_path, *layout)
        ranks = run_ranks(buffers_after_load, mesh_shape(config).world_size, config, path)
        assert {buffer.shape for own in ranks for name, buffer in own.items() if "level" in name} == {
            torch.Size([32 // mesh_shape(config).tp])
        }
        reader = CheckpointReader(f"{path}0")
        for name in NAMES:
            assert torch.equal(reader.read(name), expected[name]), (layout, name)


def test_recompute_updates_a_buffer_once(tmp_path: Path) -> None:
    plain, expected = continued(tracking(tmp_path), 0, 3)
    for more in (["recompute.mode=full"], ["recompute.mode=pattern", "recompute.pattern=blocks\\.\\d+\\.mlp"]):
        found, state = continued(tracking(tmp_path, *more), 0, 3)
        assert found == plain
        assert all(torch.equal(state[name], x) for name, x in expected.items())


def message_of_save(config: TrainConfig, path: str, asynchronous: bool, steps: int) -> str:
    training = built(config)
    if steps > 1:  # the second of two asynchronous saves reuses the plan of the first
        save(f"{path}1", training.state(), training.mesh, asynchronous=asynchronous).wait()
    run(training, range(1))
    try:
        save(path, training.state(), training.mesh, asynchronous=asynchronous).wait()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("asynchronous", "steps"), [(False, 1), (True, 2)])
def test_replicas_that_differ_are_an_error_that_names_them(asynchronous: bool, steps: int, tmp_path: Path) -> None:
    config = tracking(tmp_path, "parallel.dp=2", "parallel.tp=2", layer="StrayMLP")
    path = tmp_path / "step_00000001"
    messages = run_ranks(message_of_save, 4, config, str(path), asynchronous, steps)
    assert len(set(messages)) == 1
    for name in ("mean", "level"):
        assert f"model/blocks.1.mlp.{name}: rank 0 (pp0 dp0 tp0) and rank 2 (pp0 dp1 tp0) hold different" in messages[0]
    assert "count" not in messages[0] and not path.exists()


def loaded(config: TrainConfig, path: str) -> tuple[str, list[str]]:
    """The error of a strict restore, and the names that a lenient load reports as missing."""
    training = built(config)
    try:
        training.restore(Path(path))
    except CheckpointError as error:
        return str(error), [*load(path, training.state(), training.mesh, strict=False).missing]
    return "", []


def without_buffers(config: TrainConfig, path: str) -> None:
    training = built(config)
    state = training.state()
    state.items = [item for item in state.items if item.name not in NAMES]
    save(path, state, training.mesh).wait()


def test_a_checkpoint_without_buffers_names_what_is_missing(tmp_path: Path) -> None:
    path, config = str(tmp_path / "step_00000001"), tracking(tmp_path)
    run_ranks(without_buffers, 1, config, path)
    ((error, missing),) = run_ranks(loaded, 1, config, path)
    assert "missing from the checkpoint" in error and all(name in error for name in NAMES)
    assert set(missing) == NAMES
    shapes = check_model(config, ErrorCollector(), None)
    with pytest.raises(ConfigError, match=r"blocks.0.mlp.mean is not in the checkpoint"):
        check_fit("resume", Path(path), shapes, strict=True)
    check_fit("resume", Path(path), shapes, strict=False)


def evaluated(config: TrainConfig, path: str) -> dict[str, Tensor]:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    stages = load_stages(config, mesh, configured_schedule(config, mesh.shape), Path(path))
    return {f"model/{name}": buffer.clone() for stage in stages for name, buffer in persistent_buffers(stage).items()}


def load_weights_of(config: TrainConfig, path: str) -> dict[str, Tensor]:
    training = built(config)
    training.load_weights(Path(path))
    return {f"model/{name}": x.clone() for stage in training.stages for name, x in persistent_buffers(stage).items()}


def test_loading_weights_loads_their_buffers(tmp_path: Path) -> None:
    path = str(tmp_path / "step_00000001")
    _, expected = continued(tracking(tmp_path, "parallel.dp=2"), 0, 1, end=path)
    for read in (evaluated, load_weights_of):
        (found,) = run_ranks(read, 1, tracking(tmp_path, "precision=bf16"), path)
        assert found.keys() == NAMES
        assert all(torch.equal(x, expected[name]) for name, x in found.items())


def initial(config: TrainConfig) -> dict[str, Tensor]:
    training: Training = build_training(config, Mesh.single())
    return {name: x.clone() for stage in training.stages for name, x in stage.named_buffers()}


def test_buffers_start_at_their_values_or_as_declared(tmp_path: Path) -> None:
    (found,) = run_ranks(initial, 1, tracking(tmp_path, "precision=fp64"))
    assert found["blocks.0.mlp.level"].unique().tolist() == [0.25]
    assert found["blocks.0.mlp.gain"].unique().tolist() == [1.0]
    assert found["blocks.0.mlp.count"].dtype == torch.int64 and not found["blocks.0.mlp.mean"].any()
    (declared,) = run_ranks(initial, 1, tracking(tmp_path, layer="DeclaredBlankMLP"))
    assert not declared["blocks.0.mlp.table"].any() and not declared["blocks.0.mlp.table"].is_meta


def test_a_buffer_without_values_is_reported_before_launch(tmp_path: Path) -> None:
    errors = ErrorCollector()
    check_model(tracking(tmp_path, layer="BlankMLP"), errors, None)
    (found,) = errors.found
    assert "blocks.0.mlp.table: a buffer built on the meta device has no values" in str(found)
    assert str(found).count("init=Zeros()") == 2
