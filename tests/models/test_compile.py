"""Compiled blocks compute the same as eager ones, share one compilation, and fail with the name of the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megastack.assemble.training import build_training
from megastack.batch import Microbatch
from megastack.config.convert import replace_values
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import ModelOptions, RecomputeMode, RecomputeOptions
from megastack.errors import ConfigError
from megastack.layers.context import Context
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.models import compile as compiled
from megastack.models.config import ModelConfig
from megastack.models.decoder import Decoder
from megastack.placement.module import initialise_
from megastack.testing.compare import TOLERANCES, Trace, differences
from megastack.testing.ranks import run_ranks
from megastack.testing.training import TrainConfig, _trace_on_rank, composed
from tests.tiny_runs import overrides

CPU, B, S, V = torch.device("cpu"), 2, 8, 32


class BranchingMLP(ParallelMLP):
    """A layer that reads a tensor on the host, which cannot be traced."""

    def activate(self, up: Tensor) -> Tensor:
        return super().activate(up if up.sum() > 0 else -up)


class WarmingMLP(ParallelMLP):
    """A layer that reads the step."""

    def forward(self, hidden_BSD: Tensor, context: Context | None = None) -> Tensor:
        assert context is not None
        return super().forward(hidden_BSD, context) * (1 + context.step)


def decoder(recompute: str = "none", **options: Any) -> Decoder:
    model = ModelOptions(layers=3, heads=2, hidden=8, ffn=16, vocab=V, **options)
    built = Decoder(ModelConfig(model=model, recompute=RecomputeOptions(mode=RecomputeMode(recompute))), Mesh.single())
    initialise_(built, built.mesh, 0, device=CPU)
    return built


def microbatch(step: int) -> Microbatch:
    """Two documents in each row, divided at another place in every step."""
    generator = torch.Generator().manual_seed(step)
    tokens_BS = torch.randint(V, (B, S), generator=generator)
    documents_BS = (torch.arange(S) > step).long().repeat(B, 1)
    positions_BS = torch.arange(S) - documents_BS * (step + 1)
    return Microbatch(tokens_BS, tokens_BS.roll(-1, 1), positions_BS, documents_BS, torch.arange(B) + step, step)


def results(stage: Decoder, step: int) -> list[Tensor]:
    stage.zero_grad()
    objective = stage({}, microbatch(step)).objective.sum()
    objective.backward()
    return [objective.detach(), *(p.grad for p in stage.parameters() if p.grad is not None)]


def assert_equal_to_eager(backend: str, steps: int, **options: Any) -> None:
    """Compiled once, for three blocks and all steps."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    eager, stage = decoder(**options), decoder(**options)
    stage.compiled_blocks = compiled.CompiledBlocks(stage.mesh, counter)
    for step in range(steps):
        for found, expected in zip(results(stage, step), results(eager, step), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    with torch.no_grad():
        assert torch.equal(stage.logits({}, microbatch(0)), eager.logits({}, microbatch(0)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_all_blocks_and_steps_share_one_compilation(backend: str) -> None:
    layer = {"_target_": f"{__name__}.WarmingMLP"}
    assert_equal_to_eager(backend, 2, recompute="full", dropout=0.2, mlp=layer)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("options", [{"attention_dropout": 0.2}, {"norm": "layer", "activation": "gelu", "bias": True}])
def test_every_layer_and_recompute_mode(backend: str, recompute: str, options: dict[str, Any]) -> None:
    assert_equal_to_eager(backend, 2, recompute=recompute, **options)


def test_a_layer_that_cannot_be_traced_is_named() -> None:
    stage = decoder(mlp={"_target_": f"{__name__}.BranchingMLP"})
    stage.compiled_blocks = compiled.CompiledBlocks(stage.mesh, "eager")
    where = (
        r"blocks\.0\.mlp, a tests\.models\.test_compile\.BranchingMLP, cannot be compiled \(test_compile\.py, line \d+"
    )
    with pytest.raises(ConfigError, match=f"^compile=true: {where}.*; use compile=false$"):
        stage({}, microbatch(0))


def test_a_missing_compiler_is_an_error_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.cpp_builder import cpp_compiler_search

    monkeypatch.setenv("PATH", "")
    cpp_compiler_search.cache_clear()
    with pytest.raises(ConfigError, match=r"^compile=true: .*C\+\+ compiler.*install g\+\+.*or use compile=false$"):
        compiled.CompiledBlocks(Mesh.single())


LAYOUTS = {
    "dp2, ZeRO 1, packed documents": ["parallel.dp=2", "parallel.zero.stage=1", "data.pack=true"],
    "pp2": ["parallel.pp=2", "recompute.mode=selective"],
    "interleaved": [
        *("parallel.pp=2", "schedule=interleaved", "schedule.chunks=2"),
        *("model.layers=4", "recompute.mode=full"),
    ],
    "bf16": ["precision=bf16"],
}
CASES = [(layout, backend) for layout in LAYOUTS for backend in ("aot_eager", "inductor")]
CASES.remove(("bf16", "inductor"))  # it keeps intermediate results in fp32


def traced(config: TrainConfig, backend: str) -> Trace | None:
    with patch.object(compiled, "BACKEND", backend):
        return _trace_on_rank(config, 5, None)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "backend"), CASES)
def test_every_layout_trains_as_without_compilation(layout: str, backend: str, tmp_path: Path) -> None:
    precise = ["precision=fp32", "optim.name=sgd", "batch.global_size=8", "run.steps=8", "model.dropout=0.1"]
    config = composed(overrides(tmp_path), precise, LAYOUTS[layout])
    world = mesh_shape(config).world_size
    runs = [replace_values(config, {"compile": on}) for on in (False, True)]
    eager, found = (run_ranks(traced, world, run, backend, timeout=600)[0] for run in runs)
    assert eager is not None
    assert found is not None
    assert differences(eager, found, tolerance=TOLERANCES[torch.float32]) == []


def losses_in_bf16(compiles: bool) -> tuple[list[float], set[torch.dtype]]:
    sizes = ["model.layers=1", "batch.global_size=2", "batch.micro_size=1", "batch.sequence_length=16"]
    names = ["model=llama_byte", "precision=bf16", "device=cpu", "run.steps=3", "lr.warmup_steps=0"]
    config = composed([*names, *sizes, f"compile={str(compiles).lower()}"])
    training = build_training(config, Mesh.from_environment(mesh_shape(config), device="cpu"))
    found = [float(training.step(step).loss or torch.nan) for step in range(2)]
    return found, {p.grad.dtype for p in training.stages[0].blocks.parameters() if p.grad is not None}


def test_bf16_weights_with_fp32_gradients_train_compiled() -> None:
    """The products of the compiled blocks are accumulated unrounded, like those of the eager ones."""
    with patch.object(compiled, "BACKEND", "aot_eager"):
        eager, traced = losses_in_bf16(False), losses_in_bf16(True)
    assert eager[1] == traced[1] == {torch.float32}
    assert eager[0][0] == traced[0][0]
    assert eager[0][1] == pytest.approx(traced[0][1], rel=1e-3) and eager[0][1] != eager[0][0]


def losses_and_compilations(config: TrainConfig, steps: int) -> tuple[list[float], int]:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    with patch.object(compiled, "BACKEND", counter):
        training = build_training(config, Mesh.from_environment(mesh_shape(config), device="cpu"))
        return [float(training.step(step).loss or torch.nan) for step in range(steps)], counter.frame_count


@pytest.mark.full
def test_steps_without_a_wait_between_them_share_one_compilation(tmp_path: Path) -> None:
    """Nothing reads the weights between the steps, so the blocks of a step are called with ZeRO's gathers pending."""
    layout = ["precision=fp32", "parallel.dp=2", "parallel.zero.stage=1", "model.dropout=0.1", "run.steps=3"]
    config = composed(overrides(tmp_path), layout)
    runs = [replace_values(config, {"compile": on}) for on in (False, True)]
    eager, found = (run_ranks(losses_and_compilations, 2, run, 3, timeout=600) for run in runs)
    assert [count for _, count in eager] == [0, 0] and [count for _, count in found] == [1, 1]
    assert found[0][0] == pytest.approx(eager[0][0], rel=1e-5)
