"""Train a configuration for a few steps on some layout and keep everything that a layout must not change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megastack.build import Training, build_training
from megastack.config.layout_rules import mesh_shape
from megastack.checkpoint.collect import model_items
from megastack.checkpoint.dump import gather_items
from megastack.config.compose import compose
from megastack.config.schema import TrainConfig
from megastack.mesh.mesh import Mesh
from megastack.testing.compare import TOLERANCES, Difference, Trace, differences
from megastack.testing.ranks import run_ranks


def trace_training(training: Training, steps: int) -> Trace:
    """Run the first steps and gather losses, gradients and weights; all ranks call, all get the whole."""
    trace = Trace()
    for step in range(steps):
        outcome = training.step(step, lambda: trace.gradients.append(_gathered(training, "gradients")))
        trace.losses.append(float(outcome.loss))
        trace.norms.append(float(outcome.grad_norm))
        trace.rates.append(outcome.lr)
        trace.weights.append(_gathered(training, "weights"))
    return trace


def _gathered(training: Training, what: str) -> dict[str, torch.Tensor]:
    items = training.gradient_items() if what == "gradients" else model_items(training.stages, training.mesh)
    return {name.partition("/")[2]: x for name, x in gather_items(items, training.mesh).items()}


def trace_layout(config: TrainConfig, steps: int, *, timeout: float = 120) -> Trace:
    """The trace of a configuration on its own layout, on forked ranks of this machine."""
    trace: Trace = run_ranks(_on_rank, mesh_shape(config).world_size, config, steps, timeout=timeout)[0]
    return trace


def _on_rank(config: TrainConfig, steps: int) -> Trace | None:
    mesh = Mesh.from_environment(mesh_shape(config))
    trace = trace_training(build_training(config, mesh), steps)
    return trace if mesh.rank == 0 else None


def layout_differences(reference: Trace, config: TrainConfig, steps: int) -> list[Difference]:
    """How the training of ``config`` differs from a reference trace of the same training elsewhere."""
    dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    adam_fp32 = config.optim.name == "adamw" and dtype == torch.float32
    trace = trace_layout(config, steps)
    return differences(reference, trace, tolerance=TOLERANCES[dtype], adam_fp32=adam_fp32)


def composed(*overrides: str | Sequence[str]) -> TrainConfig:
    """A configuration from overrides and lists of overrides."""
    flat = [item for part in overrides for item in ([part] if isinstance(part, str) else part)]
    return compose(flat)
