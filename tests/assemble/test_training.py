"""A built training: dtypes of its parameters, and its state on resume, on another layout too."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megastack.assemble.training import Training, build_training
from megastack.checkpoint.save import save
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.testing.gather import gather_whole
from megastack.testing.ranks import run_ranks
from megastack.testing.training import composed
from tests.tiny_runs import overrides

DP2_TP2 = ["parallel.dp=2", "parallel.tp=2"]
DP2_PP2 = ["parallel.dp=2", "parallel.pp=2"]
ZERO1 = "parallel.zero.stage=1"


def built(config: TrainConfig) -> Training:
    return build_training(config, Mesh.from_environment(mesh_shape(config), device="cpu"))


def run(training: Training, steps: range) -> list[tuple[float, float]]:
    """Run steps; their losses and gradient norms."""
    found = []
    for step in steps:
        outcome = training.step(step)
        training.progress.step = step + 1
        found.append((float(outcome.loss), float(outcome.grad_norm)))
    return found


def everything(training: Training) -> dict[str, Tensor]:
    """The whole state by name, on the first rank."""
    items = [replace(item, name=f"state/{item.name}") for item in training.state().items]
    return gather_whole(items, training.mesh)[0]


def steps_of(config: TrainConfig, first: int, last: int, start: str | None, end: str | None) -> Any:
    """Run steps from a checkpoint or from the start; their losses, and the state afterwards."""
    training = built(config)
    if start is not None:
        training.restore(Path(start))
        assert training.progress.step == first
    losses = run(training, range(first, last))
    if end is not None:
        save(end, training.state(), training.mesh).wait()
    return losses, everything(training)


def continued(config: TrainConfig, first: int, last: int, start: str | None = None, end: str | None = None) -> Any:
    return run_ranks(steps_of, mesh_shape(config).world_size, config, first, last, start, end)[0]


def tiny(folder: Path, *more: str) -> TrainConfig:
    return composed(overrides(folder), "run.steps=6", "optim.name=adamw", "optim.lr=0.01", *more)


# Dtypes.


def formats(config: TrainConfig) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    training = built(config)
    names = dict(training.step.buckets.named_gradients())
    run(training, range(1))
    return {
        name: (parameter.dtype, names[name].dtype)
        for stage in training.stages
        for name, parameter in stage.named_parameters()
    }


@pytest.mark.parametrize(("compute", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_parameters_are_kept_in_fp32_by_pattern_and_gradients_are_fp32(
    compute: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = tiny(tmp_path, f"precision={compute}", "model.qk_norm=true", "precision.keep_fp32=[norm,mlp.up,embedding]")
    found = run_ranks(formats, 1, config)[0]
    kept = {name for name, (parameter, _) in found.items() if parameter == torch.float32}
    assert kept == {name for name in found if "norm" in name or "mlp.up" in name or "embedding" in name}
    assert {parameter for parameter, _ in found.values()} == {torch.float32, dtype}
    assert {gradient for _, gradient in found.values()} == {torch.float32}


def test_keep_fp32_does_not_lower_fp64(tmp_path: Path) -> None:
    found = run_ranks(formats, 1, tiny(tmp_path))[0]
    assert {dtype for pair in found.values() for dtype in pair} == {torch.float64}


@pytest.mark.parametrize("layout", [DP2_TP2, [*DP2_PP2, ZERO1, "model.tied=true"]], ids=str)
def test_low_precision_trains_like_fp32(layout: list[str], tmp_path: Path) -> None:
    """bf16 rounds to 1/256, but sums, main parameters and moments are fp32: losses stay near those of fp32."""
    expected, _ = continued(tiny(tmp_path, "precision=fp32"), 0, 4)
    for compute in ("bf16", "fp16"):
        found, state = continued(tiny(tmp_path, f"precision={compute}", *layout), 0, 4)
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=0.01)
        kinds = {name.split("/")[1] for name in state if name.startswith("optim/")}
        assert kinds == {"exp_avg", "exp_avg_sq", "master", "step"}
        assert {x.dtype for name, x in state.items() if name.startswith("optim/") and x.dim()} == {torch.float32}


def test_a_fixed_loss_scale_changes_nothing(tmp_path: Path) -> None:
    plain, expected = continued(tiny(tmp_path), 0, 2)
    scaled, found = continued(tiny(tmp_path, "precision.loss_scale=1024"), 0, 2)
    assert scaled == plain and all(torch.equal(found[name], x) for name, x in expected.items())


# Resume and other layouts.


@pytest.mark.parametrize(
    "more",
    [["precision=bf16", *DP2_PP2, ZERO1, "model.tied=true"], ["precision=fp16", "parallel.dp=2"]],
    ids=str,
)
def test_a_resumed_low_precision_run_equals_an_uninterrupted_one_bitwise(more: list[str], tmp_path: Path) -> None:
    path, config = str(tmp_path / "step_00000003"), tiny(tmp_path, *more)
    uninterrupted, expected = continued(config, 0, 6)
    first, _ = continued(config, 0, 3, end=path)
    second, found = continued(config, 3, 6, start=path)
    assert first + second == uninterrupted
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def set_main_parameters(config: TrainConfig, path: str) -> list[float]:
    """Write 0.1234567 into every main parameter, save, and restore it in another training."""
    training = built(config)
    for parts in training.step.optimizer.main_parameters().values():
        for _, part in parts:
            part.fill_(0.1234567)
    training.step.optimizer.copy_main_to_model()
    save(path, training.state(), training.mesh).wait()
    other = built(config)
    other.restore(Path(path))
    main_parameters = [part for parts in other.step.optimizer.main_parameters().values() for _, part in parts]
    assert all(part.dtype == torch.float32 for part in main_parameters)
    weight = dict(other.stages[0].named_parameters())["blocks.0.mlp.down.weight"]
    return [*{x for part in main_parameters for x in part.unique().tolist()}, *weight.float().unique().tolist()]


def test_main_parameters_are_saved_bitwise_in_fp32(tmp_path: Path) -> None:
    exact, rounded = (torch.tensor(0.1234567, dtype=dtype).item() for dtype in (torch.float32, torch.bfloat16))
    config = tiny(tmp_path, "precision=bf16", "parallel.dp=2", ZERO1)
    assert run_ranks(set_main_parameters, 2, config, str(tmp_path / "step_00000001")) == [[exact, rounded]] * 2


def start_from_weights(config: TrainConfig, path: str) -> bool:
    """Whether main parameters equal the loaded weights, and a first step with lr 0 keeps the weights."""
    training = built(config)
    training.load_weights(Path(path))
    weights = {name: x.detach().clone() for stage in training.stages for name, x in stage.named_parameters()}
    optimizer = training.step.optimizer
    same = all(
        torch.equal(part.to(weights[name].dtype), weights[name][box.slices])
        for name, parts in optimizer.main_parameters().items()
        for box, part in parts
    )
    optimizer.step(0.0)
    training.step.buckets.wait_parameters()
    after = {name: x for stage in training.stages for name, x in stage.named_parameters()}
    return same and all(torch.equal(after[name], x) for name, x in weights.items()) and int(optimizer.steps) == 1


def test_main_parameters_are_copied_from_loaded_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "step_00000003")
    config = tiny(tmp_path, "precision=bf16", "parallel.dp=2", ZERO1)
    continued(config, 0, 3, end=path)
    assert all(run_ranks(start_from_weights, 2, tiny(tmp_path, "precision=bf16", "parallel.dp=2", ZERO1), path))
    assert all(run_ranks(start_from_weights, 1, tiny(tmp_path, "precision=bf16"), path))


MOVES = [
    (["parallel.dp=4", ZERO1], [["parallel.dp=2"], [], [*DP2_TP2, ZERO1]]),
    (["parallel.dp=2"], [["parallel.dp=4", ZERO1, "parallel.zero.shard_size=2"], [*DP2_PP2, ZERO1]]),
]


@pytest.mark.parametrize(
    ("source", "targets"),
    [pytest.param(*MOVES[0], marks=pytest.mark.full), MOVES[1]],
    ids=["from ZeRO-1", "to ZeRO-1"],
)
def test_a_run_resumes_on_another_layout_and_zero_level(
    source: list[str], targets: list[list[str]], tmp_path: Path
) -> None:
    path, more = str(tmp_path / "step_00000003"), ["model.tied=true"]
    uninterrupted, expected = continued(tiny(tmp_path, *more), 0, 6)
    continued(tiny(tmp_path, *more, *source), 0, 3, end=path)
    for target in targets:
        found, state = continued(tiny(tmp_path, *more, *target), 3, 6, start=path)
        torch.testing.assert_close(found, uninterrupted[3:], rtol=1e-10, atol=0)
        assert set(state) == set(expected)
        for name, x in expected.items():
            torch.testing.assert_close(state[name], x, rtol=1e-9, atol=1e-12, msg=name)


def test_offloading_the_optimizer_changes_nothing(tmp_path: Path) -> None:
    more = ["precision=bf16", "parallel.dp=2", ZERO1]
    uninterrupted, expected = continued(tiny(tmp_path, *more), 0, 2)
    found, state = continued(tiny(tmp_path, *more, "parallel.zero.offload=true"), 0, 2)
    assert found == uninterrupted and all(torch.equal(state[name], x) for name, x in expected.items())


# Gradients that are not finite.


def poison(training: Training, rank: int, value: float) -> RemovableHandle:
    """Make one element of a gradient of one rank not finite, until the handle is removed."""
    weight = training.stages[0].get_parameter("blocks.0.attention.q.weight")

    def poisoned(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if training.mesh.rank == rank:
            gradient.view(-1)[0] = value
        return gradient

    return weight.register_hook(poisoned)


def three_steps(config: TrainConfig, value: float | None) -> Any:
    """Three steps, the second with a poisoned gradient on rank 3; or only two, with the scale halved between them."""
    training = built(config)
    run(training, range(1))
    before = everything(training)
    scales = [training.step.loss_scale.value.item()]
    if value is None:
        training.step.loss_scale.update(torch.ones(()))
    else:
        handle = poison(training, 3, value)
        (_, norm), *_ = run(training, range(1, 2))
        handle.remove()
        assert not math.isfinite(norm)
        after = everything(training)
        changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
        assert changed <= {"loss_scale/scale", "loss_scale/good_steps"}, changed
    scales.append(training.step.loss_scale.value.item())
    losses = run(training, range(2, 3))
    return scales, losses, int(training.step.optimizer.steps), everything(training)


@pytest.mark.parametrize(("value", "zero"), [(math.nan, "0"), (math.inf, "1")])
def test_a_nonfinite_gradient_on_one_rank_makes_all_ranks_skip_and_halve_the_scale(
    value: float, zero: str, tmp_path: Path
) -> None:
    config = tiny(tmp_path, "precision=fp16", *DP2_TP2, f"parallel.zero.stage={zero}")
    poisoned, clean = run_ranks(three_steps, 4, config, value), run_ranks(three_steps, 4, config, None)
    for found, expected in zip(poisoned, clean, strict=True):
        assert found[:3] == expected[:3] and found[0] == [2.0**16, 2.0**15] and found[2] == 2
        assert all(torch.equal(found[3][name], x) for name, x in expected[3].items())
