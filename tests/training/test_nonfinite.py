"""Where a loss or gradient that is not finite came from."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

import megastack
from megastack.assemble.training import build_training
from megastack.config.layout_rules import mesh_shape
from megastack.mesh.mesh import Mesh
from megastack.testing.ranks import run_ranks
from megastack.training.nonfinite import NonfiniteOrigin, locate_nonfinite
from tests.tiny_runs import overrides


def origin(folder: str, where: str, *more: str) -> NonfiniteOrigin:
    """One step on four ranks, poisoned on the last of them; what every rank finds."""
    choices = ("parallel.pp=2", "parallel.dp=2", "model.layers=4", "parallel.layers_per_stage=[2,2]", *more)
    config = megastack.compose([*overrides(Path(folder)), *choices])
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    training = build_training(config, mesh)
    block = training.stages[0].blocks["2"] if mesh.rank == 3 else None
    calls = 0

    def poison(module: torch.nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        bad = module.training and torch.is_grad_enabled() if where == "backward" else (calls - 1) % 2 == 1
        if bad and where == "backward" and output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.nan)
        return output * torch.nan if bad and where == "forward" else output

    if block is not None and where in ("forward", "backward"):
        block.mlp.register_forward_hook(poison)
    if block is not None and where == "weight":
        with torch.no_grad():
            block.mlp.down.weight.fill_(torch.inf)
    outcome = training.step(0)
    assert not (torch.isfinite(outcome.loss) and torch.isfinite(outcome.grad_norm))
    return locate_nonfinite(training.step, training.stages, 0)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("forward", ", on rank 3 (pp1 dp1 tp0): first in the output of blocks.2.mlp, microbatch 1; first gradient "),
        ("backward", ", on rank 2 (pp1 dp0 tp0): first gradient blocks.2.mlp"),
        ("weight", ", on rank 3 (pp1 dp1 tp0): first in the output of blocks.2.mlp.down, microbatch 0; the weight "),
    ],
)
def test_the_first_module_and_the_first_gradient_are_named_on_all_ranks(where: str, text: str) -> None:
    """A gradient is a sum over data ranks by then, so the first of them is named; a forward has one origin."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(origin, 4, folder, where)
    assert len({each.text for each in found}) == 1
    assert found[0].text.startswith(text)
    assert found[0].rank == (2 if where == "backward" else 3)


def test_the_slices_of_zero_are_looked_at_whole() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(origin, 4, folder, "backward", "parallel.zero.stage=1", "optim=adamw")
    assert {each.text for each in found} == {found[0].text} and "blocks.2.mlp" in found[0].text
