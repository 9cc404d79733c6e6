"""Train a configuration for a few steps on some layout and keep everything that a layout must not change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megastack.assemble.training import Training, build_training
from megastack.config.compose import compose
from megastack.config.layout_rules import mesh_shape
from megastack.config.schema import TrainConfig
from megastack.data.dataset import Dataset
from megastack.mesh.mesh import Mesh
from megastack.testing.compare import TOLERANCES, Difference, Trace, differences
from megastack.testing.gather import gather_whole
from megastack.testing.ranks import run_ranks


def trace_training(training: Training, steps: int) -> Trace:
    """Run the first steps; all ranks call, the first one gets gradients and weights, all of them losses and norms."""
    mesh = training.mesh
    trace = Trace(gather_whole(training.weight_items(), mesh)[0])
    for step in range(steps):
        outcome = training.step(step, lambda: trace.add_gradients(*gather_whole(training.gradient_items(), mesh)))
        if outcome.loss is None:  # no valid label, so no gradients either
            trace.add_gradients({}, {})
        trace.losses.append(as_number(outcome.loss))
        trace.norms.append(as_number(outcome.grad_norm))
        trace.rates.append(outcome.lr)
        trace.add_weights(*gather_whole(training.weight_items(), mesh))
    return trace


def as_number(value: Tensor | None) -> float:
    """A scalar of a step; 0 for a step without a valid label, on whatever layout."""
    return 0.0 if value is None else float(value)


def trace_layout(config: TrainConfig, steps: int, *, dataset: Dataset | None = None, timeout: float = 120) -> Trace:
    """The trace of a configuration on its own layout, on forked ranks of this machine.

    Args:
        config: a legal configuration.
        steps: how many optimizer steps.
        dataset: its data, where they were read already.
        timeout: seconds after which the ranks are killed.
    """
    world = mesh_shape(config).world_size
    trace: Trace = run_ranks(_on_rank, world, config, steps, dataset, timeout=timeout)[0]
    return trace


def _on_rank(config: TrainConfig, steps: int, dataset: Dataset | None) -> Trace | None:
    mesh = Mesh.from_environment(mesh_shape(config), device="cpu")
    trace = trace_training(build_training(config, mesh, dataset), steps)
    return trace if mesh.rank == 0 else None


def layout_differences(
    reference: Trace, config: TrainConfig, steps: int, *, dataset: Dataset | None = None
) -> list[Difference]:
    """How the training of ``config`` differs from a reference trace of the same training elsewhere."""
    dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
    adam_fp32 = config.optim.name == "adamw" and dtype == torch.float32
    trace = trace_layout(config, steps, dataset=dataset)
    return differences(reference, trace, tolerance=TOLERANCES[dtype], adam_fp32=adam_fp32)


def composed(*overrides: str | Sequence[str]) -> TrainConfig:
    """A configuration from overrides and lists of overrides."""
    flat = [item for part in overrides for item in ([part] if isinstance(part, str) else part)]
    return compose(flat)
