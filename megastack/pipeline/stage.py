"""One stage of a pipeline on its rank: forward and backward of a microbatch, and the state kept between them.

A stage's module is called with the stage inputs, named tensors from the previous stage (``{}`` on the first stage), and
the microbatch. It returns the inputs of the next stage or, on the last one, a :class:`~megastack.batch.StageLoss`. Only
the gradient edges of the output are kept, so its memory is freed once it is sent. A backward can defer the gradients of
weights; their operands are then kept until :meth:`Stage.backward_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megastack.batch import Microbatch, StageLoss
from megastack.weight_gradients import DeferredGradients, deferring

StageTensors = Mapping[str, Tensor | None]
"""The inputs or outputs of a stage, or their gradients, by name."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one stage input or output, which suffice to receive it and its gradient."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str = ""
    needs_grad: bool = False

    @staticmethod
    def of(name: str, x: Tensor | None) -> TensorSpec:
        """The spec of a tensor; for ``None`` it has no shape."""
        if x is None:
            return TensorSpec(name, None)
        return TensorSpec(name, tuple(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> TensorSpec:
        """The inverse of ``dataclasses.asdict`` after a round trip through JSON, which has no tuples."""
        shape = record["shape"]
        return TensorSpec(
            record["name"], None if shape is None else tuple(shape), record["dtype"], record["needs_grad"]
        )

    def __str__(self) -> str:
        return f"{self.name}: None" if self.shape is None else f"{self.name}: {self.dtype} {list(self.shape)}"

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass
class _MicrobatchState:
    """The state of a microbatch between its forward and its backward."""

    inputs: dict[str, Tensor]
    edges: dict[str, GradientEdge]


class Stage:
    """A stage and its microbatches in flight.

    Args:
        module: called as ``module(inputs, microbatch)``; see above.
        index: the stage's global number.
    """

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module = module
        self.index = index
        self._held: dict[int, _MicrobatchState] = {}
        self._deferred: dict[int, DeferredGradients] = {}

    @property
    def live(self) -> int:
        """The number of microbatches whose activations, or operands of deferred weight gradients, are held."""
        return len(self._held) + len(self._deferred)

    def forward(
        self, inputs: StageTensors, microbatch: Microbatch, number: int
    ) -> dict[str, Tensor | None] | StageLoss:
        """Run the module and keep the state for the backward of microbatch ``number`` (nothing if grad is disabled)."""
        output: dict[str, Tensor | None] | StageLoss = self.module(inputs, microbatch)
        if torch.is_grad_enabled():
            differentiable = {name: x for name, x in inputs.items() if x is not None and x.requires_grad}
            self._held[number] = _MicrobatchState(differentiable, _edges(output))
        return output

    def backward(self, number: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the backward of a microbatch and release its activations.

        Args:
            number: the microbatch.
            gradients: the gradients of the outputs by name; on the last stage the inverse denominator, for
                ``objective``.

        Returns:
            The gradients of the inputs, by name, for each tensor that requires one.
        """
        held = self._held.pop(number)
        if held.edges:
            edges = list(held.edges.values())
            torch.autograd.backward(edges, [gradients[name] for name in held.edges])
        return {name: x.grad if x.grad is not None else torch.zeros_like(x) for name, x in held.inputs.items()}

    def backward_input(self, number: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Like :meth:`backward`, but leave weight gradients that can be deferred to :meth:`backward_weights`."""
        with deferring() as deferred:
            produced = self.backward(number, gradients)
        self._deferred[number] = deferred
        return produced

    def pending_parameters(self, number: int) -> frozenset[Tensor]:
        """The parameters that have a pending gradient of a microbatch."""
        return self._deferred[number].parameters

    def backward_weights(self, number: int) -> None:
        """Accumulate the weight gradients that :meth:`backward_input` deferred."""
        self._deferred.pop(number).accumulate()

    def drop(self) -> None:
        """Drop all microbatches in flight, after a step was abandoned."""
        self._held.clear()
        self._deferred.clear()


def _edges(output: dict[str, Tensor | None] | StageLoss) -> dict[str, GradientEdge]:
    named = {"objective": output.objective} if isinstance(output, StageLoss) else output
    return {name: get_gradient_edge(x) for name, x in named.items() if x is not None and x.requires_grad}


def leaf(x: Tensor | None, needs_grad: bool) -> Tensor | None:
    """A tensor as a leaf of the next stage's autograd graph, detached from the previous stage's."""
    return None if x is None else x.detach().requires_grad_(needs_grad)
