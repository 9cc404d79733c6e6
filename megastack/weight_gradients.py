"""How the gradients of weights come about in a step: added in place, and where a schedule splits backwards, later.

The backward of a linear layer is two products of equal size: one makes the gradient of the input, which the previous
stage waits for, the other that of the weight, which nobody waits for before the end of the step; neither does anybody
for that of an embedding.

**In place.** While a pipeline runs a step, such a gradient is added to what ``.grad`` holds by the product itself, with
no tensor of its own and no pass over it. Hooks behind the accumulation run as ever. It goes autograd's way where there
is no such place: another dtype, no ``.grad`` yet, a weight that is computed from parameters, a hook on the gradient, a
``torch.autograd.grad`` within a layer; and, where nothing is to be put off, for small weights.

**Later.** Zero-bubble schedules (Qi et al., arXiv 2401.10241) run the second product where a rank would be idle. A
backward inside :meth:`WeightGradients.collecting` notes what the products take, and :meth:`PutOff.run` makes them. All
other parameters (norms, biases, positions, a user's own) have their gradients in the backward itself.

What is noted are tensors and edges of the graph, not functions, so that memory is what can be read off them. It is not
a pair of custom operations, which a compiler could see through: these would cost the host more than they save, and
nothing is compiled yet.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

_VIEWS = {"ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0", "AliasBackward0"}
"""What may lie between a weight and its parameter, with the elements in the same order."""
_PASSES = _VIEWS | {"ToCopyBackward0"}
"""The same with casts. These nodes keep nothing, so that they can run in a backward, with nothing, and once more."""


WORTH_ADDING_IN_PLACE = 2**18
"""The elements of a weight from which a pass over it takes longer than a function in Python."""


class Product(Protocol):
    """The gradient of a weight, to be computed."""

    def begin(self) -> None:
        """Start what is needed from other ranks, ahead of the rest."""

    def gradient(self) -> Tensor:
        """The gradient."""

    def add_to(self, gradient: Tensor) -> None:
        """Add it to a tensor of the weight's shape and dtype."""


class Target:
    """Where the gradient of a weight goes.

    Attributes:
        weight: a parameter, or a cast or view of all of one.
        parameter: that one.
    """

    __slots__ = ("_adds", "parameter", "weight")  # one is made for every layer and microbatch

    def __init__(self, weight: Tensor, parameter: Tensor, *, in_order: bool) -> None:
        self.weight, self.parameter = weight, parameter
        self._adds = in_order

    @property
    def edge(self) -> GradientEdge:
        """The weight's place in the graph."""
        return get_gradient_edge(self.weight)

    @property
    def is_stored(self) -> bool:
        """Whether the backward that is running stores the parameter's gradient, and nobody asked to see it.

        Not so in a ``torch.autograd.grad`` within a layer, whatever it is taken of.
        """
        if self.parameter._backward_hooks or self.weight._backward_hooks or torch.is_grad_enabled():
            return False
        try:
            return torch._C._will_engine_execute_node(get_gradient_edge(self.parameter).node)
        except RuntimeError:  # it is what the gradient is taken of
            return False

    @property
    def can_wait(self) -> bool:
        """Whether nothing that hangs behind the accumulation would take the backward itself for it."""
        return all(isinstance(hook, WhenStored) for hook in _hooks(self.parameter))

    def place(self) -> Tensor | None:
        """What the gradient can be added to, if it can: ``.grad`` in the weight's shape."""
        gradient = self.parameter.grad
        if gradient is None or not self._adds or not gradient.is_contiguous():
            return None
        return gradient if self.weight is self.parameter else gradient.view(self.weight.shape)


class WhenStored:
    """A hook behind a parameter's accumulation that may also be called in an I, when nothing was stored.

    Autograd calls these hooks wherever a backward passes. The gradient of a parameter with any other is not put off.
    """

    def __call__(self, parameter: Tensor) -> None:
        """Be told."""
        raise NotImplementedError


def _hooks(parameter: Tensor) -> Collection[Any]:
    return (parameter._post_accumulate_grad_hooks or {}).values()


class PutOff:
    """The products that one backward has put off."""

    def __init__(self) -> None:
        self._of: dict[Tensor, list[tuple[Target, Product]]] = {}

    def add(self, target: Target, product: Product) -> None:
        """Note a product."""
        self._of.setdefault(target.parameter, []).append((target, product))

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
            _store(products)
            products.clear()


def _begin(groups: list[list[tuple[Target, Product]]]) -> None:
    for products in groups:
        for _, product in products:
            product.begin()


@torch.no_grad()
def _store(products: list[tuple[Target, Product]]) -> None:
    """Store the gradients of one parameter."""
    parameter = products[0][0].parameter
    places = [target.place() for target, _ in products]
    if any(place is None for place in places):
        torch.autograd.backward(
            [target.edge for target, _ in products], [product.gradient() for _, product in products]
        )
        return
    for place, (_, product) in zip(places, products, strict=True):
        assert place is not None
        product.add_to(place)
    for hook in list(_hooks(parameter)):
        hook(parameter)


class WeightGradients:
    """What the layers of a mesh do with the gradients of their weights; the pipeline says.

    Attributes:
        collected: where the backward that is running puts them off; ``None`` where it computes them at once.
    """

    def __init__(self) -> None:
        self.collected: PutOff | None = None
        self._least: float = math.inf

    @contextmanager
    def on(self, *, least: int = 0) -> Iterator[None]:
        """Let forwards be such that their backward adds in place and can put off.

        Args:
            least: the elements from which a weight is worth it.
        """
        self._least = least
        try:
            yield
        finally:
            self._least = math.inf

    @contextmanager
    def collecting(self) -> Iterator[PutOff]:
        """Put off the weight gradients of the backward inside."""
        self.collected = PutOff()
        try:
            yield self.collected
        finally:
            self.collected = None

    def target_of(self, weight: Tensor) -> Target | None:
        """Where the gradient of a weight goes; ``None`` where autograd is to take it.

        That is so without grad, for small weights, and for one that is computed from parameters: its graph runs once.
        """
        if weight.numel() < self._least or not (torch.is_grad_enabled() and weight.requires_grad):
            return None
        if weight.is_leaf:
            return Target(weight, weight, in_order=True)
        end = _end(weight.grad_fn, _PASSES)
        if end is None or end.name() != "torch::autograd::AccumulateGrad":
            return None
        return Target(weight, end.variable, in_order=_end(weight.grad_fn, _VIEWS) is end)

    def give(self, target: Target | None, product: Product) -> Tensor | None:
        """In a backward: what it returns for the weight; nothing where the gradient is added in place or put off."""
        if target is None or not target.is_stored:
            return product.gradient()
        if self.collected is not None and target.can_wait:
            self.collected.add(target, product)
            return None
        place = target.place()
        if place is None:
            return product.gradient()
        product.add_to(place)
        return None


def _end(node: Any, passes: set[str]) -> Any:
    """The first node behind those."""
    while node is not None and node.name() in passes:
        node = node.next_functions[0][0]
    return node
