"""Weight gradients that are put off: what a schedule's W does, some time after its I.

The backward of a linear layer is two products of equal size: one makes the gradient of the input, which the previous
stage waits for, the other that of the weight, which nobody waits for before the end of the step. Zero-bubble schedules
(Qi et al., arXiv 2401.10241) run the second where a rank would be idle.

Where a pipeline's schedule splits backwards, the products of the layers see it in their group's :class:`Deferral`. A
backward that runs while it collects leaves the gradients of such weights out and notes what they take instead, in a
:class:`WeightGradients`, whose ``run`` puts them where autograd would have. They go through the weight's own edge of
the graph: casts and views of a parameter, accumulation and hooks are those of any backward. All other parameters
(norms, biases, a user's own) have their gradients in I.

What is noted are tensors and edges, not functions, so that memory is what can be read off them. It is not a pair of
custom operations, which a compiler could see through: these cost the host more than they would save here, and nothing
is compiled yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

_PASSES = {"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0", "ToCopyBackward0"}
"""What may lie between a weight and its parameter: nodes that keep nothing, and so can run in I and again in W."""


class PutOff(Protocol):
    """One product that is put off: the gradient of a weight."""

    @property
    def edge(self) -> GradientEdge:
        """Where the gradient goes."""

    def begin(self) -> None:
        """Start what is needed from other ranks; called once, ahead of :meth:`gradient`."""

    def gradient(self) -> Tensor:
        """The product."""


class WeightGradients:
    """The products that were put off in one backward."""

    def __init__(self) -> None:
        self._of: dict[Tensor, list[PutOff]] = {}

    def add(self, product: PutOff) -> None:
        """Note a product."""
        self._of.setdefault(_parameter(product.edge.node), []).append(product)

    @property
    def parameters(self) -> frozenset[Tensor]:
        """The parameters whose gradients are not complete before :meth:`run`."""
        return frozenset(self._of)

    def run(self) -> None:
        """Compute all of them, parameter by parameter; each is stored once, whose hooks may count on that.

        What a product needs from other ranks travels under the one before.
        """
        waiting = list(self._of.values())[::-1]
        self._of.clear()
        _begin(waiting[-1:])
        while waiting:
            products = waiting.pop()
            _begin(waiting[-1:])
            torch.autograd.backward([p.edge for p in products], [p.gradient() for p in products])
            products.clear()


def _begin(groups: list[list[PutOff]]) -> None:
    for products in groups:
        for product in products:
            product.begin()


class Deferral:
    """Whether the products of a mesh can be put off, and where to.

    Attributes:
        enabled: forwards must be such that their backward can put products off.
        collected: where the backward that is running puts them; ``None`` where it computes them at once.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.collected: WeightGradients | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Let forwards be such."""
        self.enabled = True
        try:
            yield
        finally:
            self.enabled = False

    @contextmanager
    def collecting(self) -> Iterator[WeightGradients]:
        """Put off the weight gradients of the backward inside."""
        self.collected = WeightGradients()
        try:
            yield self.collected
        finally:
            self.collected = None

    def edge_of(self, weight: Tensor) -> GradientEdge | None:
        """Where the gradient of a weight goes; ``None`` where it is not to be put off.

        That is so without grad, and for a weight that is computed from parameters: its graph runs once, in I.
        """
        if not (self.enabled and torch.is_grad_enabled() and weight.requires_grad):
            return None
        edge = get_gradient_edge(weight)
        return edge if _is_parameter(_end(edge.node)) else None


def _end(node: Any) -> Any:
    """The last node behind casts and views."""
    while node is not None and node.name() in _PASSES:
        node = node.next_functions[0][0]
    return node


def _is_parameter(node: Any) -> bool:
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _parameter(node: Any) -> Tensor:
    parameter: Tensor = _end(node).variable
    return parameter
