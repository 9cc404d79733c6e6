"""One stage of a pipeline on its rank: forward and backward of a microbatch, and what must be kept between them.

A stage's module takes a *carry*, the named tensors that cross the boundary before it (``{}`` on the first stage), and
the microbatch; it returns the carry for the next stage or, on the last one, a :class:`~megastack.batch.StageLoss`. Of
the output only its gradient edges are kept, so that its memory is free as soon as it was sent. A backward can leave the
gradients of weights for later; then what they take is kept until :meth:`Stage.backward_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megastack.batch import Microbatch, StageLoss
from megastack.weight_gradients import PutOff, WeightGradients

StageTensors = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class TensorSpec:
    """What is known of one tensor at a boundary: enough to receive it, and its gradient."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str = ""
    needs_grad: bool = False

    @staticmethod
    def of(name: str, x: Tensor | None) -> TensorSpec:
        """The description of a tensor that is about to cross; ``None`` crosses as a slot without a shape."""
        if x is None:
            return TensorSpec(name, None)
        return TensorSpec(name, tuple(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> TensorSpec:
        """The inverse of ``dataclasses.asdict``, after a journey as JSON, which has no tuples."""
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
class _Held:
    """What a stage keeps of a microbatch from its forward to its backward."""

    inputs: dict[str, Tensor]
    edges: dict[str, GradientEdge]


class Stage:
    """A stage and its microbatches in flight.

    Args:
        module: ``module(carry, microbatch)`` as told in this file's docstring.
        index: the stage's global number.
        weight_gradients: those of the mesh that the module's layers are on.
    """

    def __init__(self, module: nn.Module, index: int, weight_gradients: WeightGradients) -> None:
        self.module = module
        self.index = index
        self._weight_gradients = weight_gradients
        self._held: dict[int, _Held] = {}
        self._put_off: dict[int, PutOff] = {}

    @property
    def live(self) -> int:
        """The number of microbatches whose activations are held, or those of them that weight gradients take."""
        return len(self._held) + len(self._put_off)

    def forward(self, carry: StageTensors, microbatch: Microbatch, number: int) -> dict[str, Tensor | None] | StageLoss:
        """Run the module and keep what the backward of microbatch ``number`` needs (nothing when grad is disabled)."""
        output: dict[str, Tensor | None] | StageLoss = self.module(carry, microbatch)
        if torch.is_grad_enabled():
            inputs = {name: x for name, x in carry.items() if x is not None and x.requires_grad}
            self._held[number] = _Held(inputs, _edges(output))
        return output

    def backward(self, number: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run the backward of a microbatch and let its activations go.

        Args:
            number: the microbatch.
            gradients: of the output, by name; on the last stage of ``objective``, the inverse denominator.

        Returns:
            The gradients of the carry, by name, for each tensor that needs one.
        """
        held = self._held.pop(number)
        if held.edges:
            edges = list(held.edges.values())
            torch.autograd.backward(edges, [gradients[name] for name in held.edges])
        return {name: x.grad if x.grad is not None else torch.zeros_like(x) for name, x in held.inputs.items()}

    def backward_input(self, number: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As :meth:`backward`, without the weight gradients that can be put off until :meth:`backward_weights`."""
        with self._weight_gradients.collecting() as put_off:
            produced = self.backward(number, gradients)
        self._put_off[number] = put_off
        return produced

    def awaited(self, number: int) -> frozenset[Tensor]:
        """The parameters whose gradients a microbatch has put off."""
        return self._put_off[number].parameters

    def backward_weights(self, number: int) -> None:
        """Make the weight gradients that :meth:`backward_input` left."""
        self._put_off.pop(number).run()

    def drop(self) -> None:
        """Forget all microbatches in flight, after a step that was given up."""
        self._held.clear()
        self._put_off.clear()


def _edges(output: dict[str, Tensor | None] | StageLoss) -> dict[str, GradientEdge]:
    named = {"objective": output.objective} if isinstance(output, StageLoss) else output
    return {name: get_gradient_edge(x) for name, x in named.items() if x is not None and x.requires_grad}


def leaf(x: Tensor | None, needs_grad: bool) -> Tensor | None:
    """A tensor as the next stage's autograd sees it: cut from the previous stage's graph."""
    return None if x is None else x.detach().requires_grad_(needs_grad)
