"""Parameters that are trained only later, unfrozen or added: they start as in a new run, and resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.errors import CheckpointError, ConfigError
from megastack.preflight.checkpoint import check_moments
from megastack.preflight.errors import ErrorCollector
from megastack.preflight.model import check_model
from megastack.testing.ranks import run_ranks
from megastack.testing.training import composed
from tests.assemble.test_training import built, everything, run
from tests.tiny_runs import overrides

RATE = 0.01
FROZEN = "optim.freeze=[mlp,blocks.1.attention.q,embedding]"
LOOSE = "checkpoint.strict=false"
GAIN = "model.mlp={_target_: tests.branch_layers.GainMLP}"


def tiny(folder: Path, *more: str) -> TrainConfig:
    fixed = ["run.steps=9", "optim.name=adamw", f"optim.lr={RATE}", "optim.weight_decay=0", "lr=constant"]
    return composed(overrides(folder), fixed, *more)


def phase(config: TrainConfig, steps: range, start: str | None, end: str) -> Any:
    """Run steps from a checkpoint; the losses, and the state before and after."""
    training = built(config)
    if start is None:
        for item in training.weight_items():  # frozen weights, changed as by another run
            if trained_late(item.name) and trained_late(" ".join(config.optim.freeze)):
                for _, part in item.boxes:
                    part.mul_(1.25)
    else:
        training.restore(Path(start))
    before = everything(training)
    losses = run(training, steps)
    save(end, training.state(), training.mesh).wait()
    return losses, before, everything(training)


def on_ranks(config: TrainConfig, steps: range, start: str | None, end: str) -> Any:
    return run_ranks(phase, mesh_shape(config).world_size, config, steps, start, end)[0]


def trained_late(name: str) -> bool:
    return "mlp" in name or "blocks.1.attention.q" in name or "embedding" in name


LAYOUTS = {
    "one rank": [],
    "dp2 tp2, ZeRO 1": ["parallel.dp=2", "parallel.tp=2", "parallel.zero.stage=1"],
    "dp2 pp2": ["parallel.dp=2", "parallel.pp=2"],
    "dp4, ZeRO 3": ["parallel.dp=4", "parallel.zero.stage=3"],
    "bf16, dp2, ZeRO 1": ["precision=bf16", "parallel.dp=2", "parallel.zero.stage=1"],
    "bf16, dp2, ZeRO 2": ["precision=bf16", "parallel.dp=2", "parallel.zero.stage=2"],
    "on the host": ["precision=bf16", "parallel.dp=2", "parallel.zero.stage=1", "parallel.zero.offload=true"],
}


def main_parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that the optimizer updates, by parameter."""
    kind = "optim/master/" if any("optim/master/" in name for name in state) else "model/"
    return {name.partition(kind)[2]: x for name, x in state.items() if name.startswith(kind)}


def check_first_update(before: Tensor, after: Tensor, exp_avg: Tensor) -> None:
    """Adam's first update is ``lr · g / (|g| + eps)``, and its first moment is a tenth of the gradient."""
    gradient = exp_avg.double() / (1 - 0.9)
    assert bool((gradient.abs() > 1e-6).any())
    expected = -RATE * gradient / (gradient.abs() + 1e-8)
    torch.testing.assert_close(after.double() - before.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unfrozen_parameters_start_as_in_a_new_run_and_resume_exactly(layout: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"step_0000000{number}") for number in (3, 5, 7)]
    more = LAYOUTS[layout]
    _, _, frozen = on_ranks(tiny(tmp_path, FROZEN, *more), range(3), None, paths[0])
    unfrozen = tiny(tmp_path, LOOSE, *more)
    _, before, after = on_ranks(unfrozen, range(3, 4), paths[0], paths[1])
    weights = {name for name in frozen if name.startswith("model/")}
    assert all(torch.equal(before[name], frozen[name]) for name in weights)
    for name in filter(trained_late, main_parameters(before)):
        check_first_update(main_parameters(before)[name], main_parameters(after)[name], after[f"optim/exp_avg/{name}"])
    starts = CheckpointReader(paths[1]).trainer["optimizer_starts"]
    assert set(starts.values()) == {3} and all(map(trained_late, starts)) and len(starts) >= 5

    uninterrupted, _, expected = on_ranks(unfrozen, range(3, 7), paths[0], paths[2])
    later, _, found = on_ranks(unfrozen, range(4, 7), paths[1], f"{paths[2]}0")
    assert later == uninterrupted[1:]
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_run_with_later_parameters_continues_on_another_layout(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"step_0000000{number}") for number in (3, 4, 6)]
    on_ranks(tiny(tmp_path, FROZEN), range(3), None, paths[0])
    on_ranks(tiny(tmp_path, LOOSE, "parallel.dp=2", "parallel.zero.stage=1"), range(3, 4), paths[0], paths[1])
    expected, _, _ = on_ranks(tiny(tmp_path), range(4, 6), paths[1], paths[2])
    for name in ("dp2 tp2, ZeRO 1", "dp2 pp2", "dp4, ZeRO 3"):
        found, _, _ = on_ranks(tiny(tmp_path, *LAYOUTS[name]), range(4, 6), paths[1], f"{paths[2]}0")
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_added_parameters_start_as_in_a_new_run(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"step_0000000{number}") for number in (3, 4)]
    on_ranks(tiny(tmp_path), range(3), None, paths[0])
    _, before, after = on_ranks(tiny(tmp_path, LOOSE, GAIN, "precision=fp64"), range(3, 4), paths[0], paths[1])
    for name in ("blocks.0.mlp.gain", "blocks.1.mlp.gain"):
        check_first_update(before[f"model/{name}"], after[f"model/{name}"], after[f"optim/exp_avg/{name}"])
    starts = CheckpointReader(paths[1]).trainer["optimizer_starts"]
    assert starts == {"blocks.0.mlp.gain": 3, "blocks.1.mlp.gain": 3}


def test_another_optimizer_starts_without_moments(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"step_0000000{number}") for number in (2, 3)]
    on_ranks(tiny(tmp_path, "optim.name=sgd", "optim.momentum=0.9"), range(2), None, paths[0])
    _, before, after = on_ranks(tiny(tmp_path, LOOSE), range(2, 3), paths[0], paths[1])
    name = "blocks.0.attention.out.weight"
    check_first_update(before[f"model/{name}"], after[f"model/{name}"], after[f"optim/exp_avg/{name}"])


def restore_error(config: TrainConfig, path: str) -> str:
    try:
        built(config).restore(Path(path))
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_strict_resume_names_parameters_without_moments_before_launch(tmp_path: Path) -> None:
    path = str(tmp_path / "step_00000001")
    on_ranks(tiny(tmp_path, FROZEN), range(1), None, path)
    config = tiny(tmp_path)
    (error,) = run_ranks(restore_error, 1, config, path)
    assert "missing from the checkpoint" in error and "optim/exp_avg/blocks.0.mlp.up.weight" in error
    model = check_model(config, ErrorCollector(), None)
    with pytest.raises(ConfigError, match=r"embedding.weight has no exp_avg in the checkpoint.*strict=false"):
        check_moments(Path(path), model, config)
    check_moments(Path(path), model, tiny(tmp_path, FROZEN))
    with pytest.raises(ConfigError, match=r"head.weight has exp_avg only in the checkpoint"):
        check_moments(Path(path), model, tiny(tmp_path, "optim.freeze=[mlp,blocks.1.attention.q,embedding,head]"))
    with pytest.raises(ConfigError, match=r"has no momentum_buffer|has exp_avg only in the checkpoint"):
        check_moments(Path(path), model, tiny(tmp_path, FROZEN, "optim.name=sgd", "optim.momentum=0.9"))
