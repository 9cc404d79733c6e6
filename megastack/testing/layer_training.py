"""A single layer trained for a few steps on a global input, on one rank or on a mesh.

The input of every step, and the weights of the loss over the output, are functions of a seed and the global index, so
each rank computes its own part: rows of the batch along dp, and rows of the sequence along tp under sequence
parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megastack.checkpoint.state import StateItem, items_of, model_items, stage_placements
from megastack.errors import PlacementError
from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.norm import grad_norm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.optim.optimizer import build_optimizer
from megastack.optim.update_rules import OptimizerOptions
from megastack.placement.boxes import Box
from megastack.placement.module import initialise_
from megastack.placement.placement import Placement
from megastack.random import counter_normal
from megastack.testing.compare import INPUT_GRADIENT, OUTPUT, Trace
from megastack.testing.gather import gather_whole
from megastack.testing.perturb import SEED, perturb_

RATE = 0.05
Factory = Callable[[Mesh], nn.Module]


@dataclass(frozen=True)
class TrainingSpec:
    """The settings of a layer's training: optimizer, dtype, and steps on a global batch (batch, sequence, hidden).

    ``hidden`` is None if it follows from the layer's parameters.
    """

    steps: int
    dtype: torch.dtype
    optimizer: str
    sequence_parallel: bool
    batch: int
    sequence: int
    hidden: int | None


@dataclass(frozen=True)
class StepResult:
    """This rank's input, with its gradient, and output of a step, before the update."""

    inputs: Tensor
    output: Tensor


class LayerTraining:
    """A layer on a mesh, initialised by global name, with perturbed constant initial values.

    Args:
        factory: builds the layer.
        mesh: the mesh.
        spec: the settings of the training.
    """

    def __init__(self, factory: Factory, mesh: Mesh, spec: TrainingSpec) -> None:
        self.mesh, self.spec = mesh, spec
        self.layer = factory(mesh)
        initialise_(self.layer, mesh, SEED, dtype=spec.dtype)
        perturb_(self.layer, mesh)
        self.buckets = GradientBuckets([self.layer], mesh)
        self.optimizer = build_optimizer(self.buckets, OptimizerOptions(spec.optimizer))
        self.placements = stage_placements([self.layer])
        self._width = spec.hidden or _width(self.placements)

    def inputs(self, step: int) -> Tensor:
        """The global input (B, S, D) of a step."""
        return self._global("input", step)

    def weights(self, step: int) -> Tensor:
        """The weights of the output (B, S, D) of a step in the loss."""
        return self._global("weight", step)

    def loss(self, output: Tensor, weights: Tensor) -> Tensor:
        """The loss of some rows of the output, divided by the number of tokens of the whole batch."""
        return (output * weights).sum() / (self.spec.batch * self.spec.sequence)

    def step(self, step: int) -> StepResult:
        """Forward, backward and gradient reduction of a step."""
        self.buckets.zero_()
        x = self._slice(self.inputs(step)).requires_grad_()
        output = self.layer(x)
        self.buckets.mark_last_backward(0)
        self.loss(output, self._slice(self.weights(step))).backward()
        self.buckets.finish()
        assert x.grad is not None, "the output does not depend on the input"
        return StepResult(x, output)

    def update(self) -> None:
        """The optimizer step."""
        self.optimizer.step(RATE)

    def gradient_items(self) -> list[StateItem]:
        """The gradients of the parameters."""
        return items_of("gradient", self.buckets.named_gradients(), self.placements, self.mesh)

    def activation_items(self, result: StepResult) -> list[StateItem]:
        """Output and input gradient as items, to be gathered like gradients."""
        assert result.inputs.grad is not None
        parts = ((OUTPUT, result.output), (INPUT_GRADIENT, result.inputs.grad))
        return [self._item(name, part) for name, part in parts]

    def _global(self, name: str, step: int) -> Tensor:
        shape = (self.spec.batch, self.spec.sequence, self._width)
        box = Box((0, 0, 0), shape)
        return counter_normal(SEED, f"{name}/{step}", shape, box, std=1.0, dtype=self.spec.dtype)

    def _slice(self, x: Tensor) -> Tensor:
        """This rank's part of a global (B, S, D) tensor."""
        return x[self._box(x.shape[-1]).slices].clone()

    def _box(self, width: int) -> Box:
        spec, shape, coordinates = self.spec, self.mesh.shape, self.mesh.coordinates
        rows = spec.batch // shape.dp
        columns = spec.sequence // shape.tp if spec.sequence_parallel else spec.sequence
        first = coordinates[Axis.TP] * columns if spec.sequence_parallel else 0
        return Box((coordinates[Axis.DP] * rows, first, 0), (rows, columns, width))

    def _item(self, name: str, part: Tensor) -> StateItem:
        width = part.shape[-1]
        whole = (self.spec.batch, self.spec.sequence, width)
        return StateItem(f"activation/{name}", whole, ((self._box(width), part.detach()),))


def trace_layer(training: LayerTraining) -> Trace | None:
    """The trace of the training, on the first rank; it holds outputs and input gradients among the gradients."""
    mesh, layer = training.mesh, training.layer
    trace = Trace(gather_whole(model_items([layer], mesh), mesh)[0])
    for step in range(training.spec.steps):
        result = training.step(step)
        trace.add_gradients(*gather_whole([*training.gradient_items(), *training.activation_items(result)], mesh))
        trace.norms.append(float(grad_norm(training.buckets, mesh)))
        training.update()
        trace.rates.append(RATE)
        trace.add_weights(*gather_whole(model_items([layer], mesh), mesh))
        if mesh.rank == 0:
            trace.losses.append(float((trace.gradients[-1][OUTPUT] * training.weights(step)).sum()))
    return trace if mesh.rank == 0 else None


def _width(placements: Mapping[str, Placement]) -> int:
    weights = [placement for name, placement in placements.items() if name.split(".")[-1] == "weight"]
    if not weights:
        raise PlacementError(
            "the layer has no parameter called weight, so the width of its input is unknown; pass hidden"
        )
    return weights[0].shape[-1]
