"""A single layer trained for a few steps on a global input, on one rank or as one part of a mesh.

The input of every step, and the weights of the loss over the output, are functions of a seed and the global index, so
each rank computes its own part: rows of the batch along dp, and of the sequence along tp where the layer takes and
gives such slices.
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
from megastack.testing.compare import Trace
from megastack.testing.gather import gather_whole
from megastack.testing.perturb import SEED, perturb_

RATE = 0.05
OUTPUT, INPUT_GRADIENT = "<output>", "<input gradient>"
Factory = Callable[[Mesh], nn.Module]


@dataclass(frozen=True)
class Task:
    """What is trained: steps over a global batch of sequences, and how; ``hidden`` is None where the layer tells it."""

    steps: int
    dtype: torch.dtype
    optimizer: str
    sequence_parallel: bool
    batch: int
    sequence: int
    hidden: int | None


@dataclass(frozen=True)
class Stepped:
    """A finished step before its update: the layer's output and its input with a gradient, both this rank's parts."""

    inputs: Tensor
    output: Tensor


class LayerTraining:
    """A layer on a mesh, initialised by global name and moved off its zeros and ones.

    Args:
        factory: builds the layer.
        mesh: where.
        task: what is trained.
    """

    def __init__(self, factory: Factory, mesh: Mesh, task: Task) -> None:
        self.mesh, self.task = mesh, task
        self.layer = factory(mesh)
        initialise_(self.layer, mesh, SEED, dtype=task.dtype)
        perturb_(self.layer, mesh)
        self.buckets = GradientBuckets([self.layer], mesh)
        self.optimizer = build_optimizer(self.buckets, OptimizerOptions(task.optimizer))
        self.placements = stage_placements([self.layer])
        self._width = task.hidden or _width(self.placements)

    def inputs(self, step: int) -> Tensor:
        """The global input (B, S, D) of a step."""
        return self._global("input", step)

    def weights(self, step: int) -> Tensor:
        """What the output (B, S, D) of a step is weighted by in the loss."""
        return self._global("weight", step)

    def loss(self, output: Tensor, weights: Tensor) -> Tensor:
        """The loss of some rows of the output, over the tokens of the whole batch."""
        return (output * weights).sum() / (self.task.batch * self.task.sequence)

    def step(self, step: int) -> Stepped:
        """Forward, backward and reductions of a step."""
        self.buckets.zero_()
        x = self._slice(self.inputs(step)).requires_grad_()
        output = self.layer(x)
        self.buckets.mark_last_backward(0)
        self.loss(output, self._slice(self.weights(step))).backward()
        self.buckets.finish()
        assert x.grad is not None, "the output does not depend on the input"
        return Stepped(x, output)

    def update(self) -> None:
        """The update of a step."""
        self.optimizer.step(RATE)

    def gradient_items(self) -> list[StateItem]:
        """The gradients of the parameters."""
        return items_of("gradient", self.buckets.named_gradients(), self.placements, self.mesh)

    def seen_items(self, stepped: Stepped) -> list[StateItem]:
        """Output and input gradient as items, so that they are gathered like a gradient."""
        assert stepped.inputs.grad is not None
        parts = ((OUTPUT, stepped.output), (INPUT_GRADIENT, stepped.inputs.grad))
        return [self._item(name, part) for name, part in parts]

    def _global(self, name: str, step: int) -> Tensor:
        shape = (self.task.batch, self.task.sequence, self._width)
        box = Box((0, 0, 0), shape)
        return counter_normal(SEED, f"{name}/{step}", shape, box, std=1.0, dtype=self.task.dtype)

    def _slice(self, x: Tensor) -> Tensor:
        """This rank's part of a global (B, S, D) tensor."""
        return x[self._box(x.shape[-1]).slices].clone()

    def _box(self, width: int) -> Box:
        task, shape, coordinates = self.task, self.mesh.shape, self.mesh.coordinates
        rows = task.batch // shape.dp
        columns = task.sequence // shape.tp if task.sequence_parallel else task.sequence
        first = coordinates[Axis.TP] * columns if task.sequence_parallel else 0
        return Box((coordinates[Axis.DP] * rows, first, 0), (rows, columns, width))

    def _item(self, name: str, part: Tensor) -> StateItem:
        width = part.shape[-1]
        whole = (self.task.batch, self.task.sequence, width)
        return StateItem(f"seen/{name}", whole, ((self._box(width), part.detach()),))


def trace_layer(training: LayerTraining) -> Trace | None:
    """The whole training on the first rank; outputs and input gradients count as gradients."""
    mesh, layer = training.mesh, training.layer
    trace = Trace(gather_whole(model_items([layer], mesh), mesh)[0])
    for step in range(training.task.steps):
        stepped = training.step(step)
        trace.add_gradients(*gather_whole([*training.gradient_items(), *training.seen_items(stepped)], mesh))
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
        raise PlacementError("the layer has no parameter called weight that tells the width of its input; pass hidden")
    return weights[0].shape[-1]
