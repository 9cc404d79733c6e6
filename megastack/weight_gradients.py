"""Weight gradients inside a pipeline step: accumulated in place, and deferred if the schedule splits backwards.

The backward of a linear layer consists of two matrix products of equal cost. One computes the gradient of the input,
which the previous stage waits for; the other computes the gradient of the weight, which is not needed before the end of
the step. The same holds for an embedding.

**In place.** Inside a :func:`weight_gradient_scope`, the product is added directly to ``.grad``, without a temporary
tensor and an extra pass over it. If ``.grad`` is wider than the weight, the product is not rounded: gradients of bf16
weights accumulate in fp32. Accumulation hooks run as usual. Autograd accumulates the gradient where this is not
possible: no ``.grad`` yet, a weight that is cast or computed from parameters, a hook on the gradient, or a
``torch.autograd.grad`` call within a layer. If nothing is deferred, autograd also handles small weights in fp32 and
fp64.

**Deferred.** Zero-bubble schedules (Qi et al., arXiv 2401.10241) run the second product when a rank would be idle. A
backward inside :func:`deferring` keeps the operands of the products, and :meth:`DeferredGradients.accumulate` computes
them. All other parameters (norms, biases, positions, a user's own) get their gradients in the backward itself.

The pipeline opens the scope for a step. A forward looks up the :class:`GradientTarget` of each weight there and keeps
it for the backward, since autograd may run that on another thread. A parameter has one target per scope; a weight that
is a view or a cast of a parameter has one per forward.

Pending products hold tensors and graph edges, not closures, so their memory can be computed. Custom operators would
cost more host time than they save; only compiled blocks use them (:mod:`megastack.layers.compiled_ops`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megastack.torch_private import (
    CASTS,
    VIEWS,
    accumulated_leaf,
    accumulation_hooks,
    has_gradient_hooks,
    will_execute,
)

HAS_GRAD_DTYPE = hasattr(Tensor, "grad_dtype")
"""Whether a parameter's gradient may have another dtype than the parameter (from torch 2.10 on)."""
WORTH_ADDING_IN_PLACE = 2**18
"""Number of elements from which a pass over a weight takes longer than a Python function call."""
_VIEWS_AND_CASTS = VIEWS | CASTS


class WeightGradient(Protocol):
    """The gradient of a weight, not yet computed."""

    def begin(self) -> None:
        """Start the communication it needs."""

    def gradient(self) -> Tensor:
        """Compute the gradient."""

    def add_to(self, gradient: Tensor) -> None:
        """Compute the gradient and add it to a tensor of the weight's shape and of at least its precision."""


class AccumulationHook:
    """A post-accumulate-grad hook of a parameter that tolerates calls without an accumulated gradient.

    Autograd calls accumulation hooks whenever a backward reaches the parameter, including an input backward (I) that
    defers its gradient. The gradient of a parameter with any other hook is not deferred.
    """

    def __call__(self, parameter: Tensor) -> None:
        """Called after the gradient is accumulated."""
        raise NotImplementedError


class WeightGradientScope:
    """The state of one :func:`weight_gradient_scope`, shared by its forwards and their backwards.

    Attributes:
        min_elements: the size of the smallest weight in fp32 or fp64 whose gradient is accumulated in place.
        deferred: collects the weight gradients of the running backward; ``None`` if it computes them.
        targets: the targets of parameters by their ids, until the scope ends.
    """

    __slots__ = ("deferred", "min_elements", "targets")

    def __init__(self, min_elements: int) -> None:
        self.min_elements = min_elements
        self.deferred: DeferredGradients | None = None
        self.targets: dict[int, GradientTarget] = {}  # a tensor's own hash is a Python call


_SCOPE: ContextVar[WeightGradientScope | None] = ContextVar("weight_gradient_scope", default=None)


def current_scope() -> WeightGradientScope | None:
    """Return the scope of forwards on this thread."""
    return _SCOPE.get()


@contextmanager
def weight_gradient_scope(*, min_elements: int = 0) -> Iterator[WeightGradientScope]:
    """Enable in-place accumulation and deferral of weight gradients for the forwards inside and their backwards.

    Args:
        min_elements: the size of the smallest weight for which this is done; smaller ones below fp32 are included,
            since autograd would round their gradients.
    """
    scope = WeightGradientScope(min_elements)
    try:
        with entered(scope):
            yield scope
    finally:
        scope.targets.clear()  # they refer to the scope


@contextmanager
def entered(scope: WeightGradientScope | None) -> Iterator[None]:
    """Enter an existing scope, for a forward that is recomputed on another thread."""
    token = _SCOPE.set(scope)
    try:
        yield
    finally:
        _SCOPE.reset(token)


@contextmanager
def deferring() -> Iterator[DeferredGradients]:
    """Defer the weight gradients of the backward inside; its forward ran in the current scope."""
    deferred, scope = DeferredGradients(), _SCOPE.get()
    if scope is None:
        yield deferred
        return
    scope.deferred = deferred
    try:
        yield deferred
    finally:
        scope.deferred = None


class GradientTarget:
    """The parameter into which the gradient of a weight is accumulated.

    Attributes:
        weight: a parameter, or a cast or view of a whole parameter.
        parameter: the parameter.
    """

    __slots__ = ("_is_cast", "_leaf", "_scope", "parameter", "weight")

    def __init__(self, weight: Tensor, parameter: Tensor, scope: WeightGradientScope, *, is_cast: bool) -> None:
        self.weight, self.parameter = weight, parameter
        self._scope, self._is_cast = scope, is_cast
        self._leaf = get_gradient_edge(parameter).node  # kept: finding it takes longer than an operation

    @property
    def edge(self) -> GradientEdge:
        """The weight's edge in the autograd graph."""
        return get_gradient_edge(self.weight)

    @property
    def is_deferring(self) -> bool:
        """Whether the running backward defers weight gradients."""
        return self._scope.deferred is not None

    @property
    def is_accumulated(self) -> bool:
        """Whether the running backward accumulates the parameter's gradient, with no hook on the gradient itself.

        Always false in a ``torch.autograd.grad`` call within a layer.
        """
        if torch.is_grad_enabled() or has_gradient_hooks(self.parameter):
            return False
        if self.weight is not self.parameter and has_gradient_hooks(self.weight):
            return False
        try:
            return will_execute(self._leaf)
        except RuntimeError:  # torch.autograd.grad computes the parameter's gradient
            return False

    @property
    def can_defer(self) -> bool:
        """Whether no accumulation hook would mistake the backward for the accumulation."""
        return all(isinstance(hook, AccumulationHook) for hook in accumulation_hooks(self.parameter))

    def buffer(self) -> Tensor | None:
        """Return ``.grad`` in the weight's shape; ``None`` if the gradient cannot be added to it."""
        gradient = self.parameter.grad
        if gradient is None or self._is_cast or not gradient.is_contiguous():
            return None
        dtype = self.weight.dtype
        if gradient.dtype != dtype and gradient.dtype != torch.promote_types(dtype, gradient.dtype):
            return None
        return gradient if self.weight is self.parameter else gradient.view(self.weight.shape)

    def accumulate(self, product: WeightGradient, *, defers: bool = True) -> Tensor | None:
        """Accumulate a gradient in a backward, or defer it; return it if autograd has to accumulate it."""
        if not self.is_accumulated:
            return product.gradient()
        deferred = self._scope.deferred
        if deferred is not None and defers and self.can_defer:
            deferred.add(self, product)
            return None
        buffer = self.buffer()
        if buffer is None:
            return product.gradient()
        product.add_to(buffer)
        return None


def target_of(weight: Tensor) -> GradientTarget | None:
    """Return the target of a weight's gradient; ``None`` if autograd accumulates it.

    Autograd accumulates it in a compiled block, outside of a scope, without grad mode, for small weights, and for a
    weight that is computed from parameters, whose graph can run only once.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    scope = _SCOPE.get()
    if scope is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return None
    target = scope.targets.get(id(weight))
    if target is not None:
        return target
    if weight.numel() < scope.min_elements and weight.dtype.itemsize >= torch.float32.itemsize:
        return None
    if weight.is_leaf:
        target = scope.targets[id(weight)] = GradientTarget(weight, weight, scope, is_cast=False)
        return target
    parameter = accumulated_leaf(weight, _VIEWS_AND_CASTS)
    if parameter is None:
        return None
    return GradientTarget(weight, parameter, scope, is_cast=accumulated_leaf(weight, VIEWS) is not parameter)


class DeferredGradients:
    """The weight gradients that one backward deferred."""

    def __init__(self) -> None:
        self._pending: dict[Tensor, list[tuple[GradientTarget, WeightGradient]]] = {}

    def add(self, target: GradientTarget, product: WeightGradient) -> None:
        """Defer a gradient."""
        self._pending.setdefault(target.parameter, []).append((target, product))

    @property
    def parameters(self) -> frozenset[Tensor]:
        """The parameters whose gradients are pending until :meth:`accumulate`."""
        return frozenset(self._pending)

    @torch.no_grad()  # communication would otherwise be recorded: operands are tensors of the forward's graph
    def accumulate(self) -> None:
        """Compute and accumulate all of them, parameter by parameter; the hooks of each parameter run once.

        The communication for a parameter overlaps with the products of the previous one.
        """
        pending = list(self._pending.values())[::-1]
        self._pending.clear()
        _begin(pending[-1:])
        while pending:
            products = pending.pop()
            _begin(pending[-1:])
            _accumulate(products)
            products.clear()


def _begin(groups: list[list[tuple[GradientTarget, WeightGradient]]]) -> None:
    for products in groups:
        for _, product in products:
            product.begin()


def _accumulate(products: list[tuple[GradientTarget, WeightGradient]]) -> None:
    """Accumulate the gradients of one parameter."""
    parameter = products[0][0].parameter
    buffers = [target.buffer() for target, _ in products]
    if any(buffer is None for buffer in buffers):
        edges, gradients = [target.edge for target, _ in products], [product.gradient() for _, product in products]
        torch.autograd.backward(edges, gradients)
        return
    for buffer, (_, product) in zip(buffers, products, strict=True):
        assert buffer is not None
        product.add_to(buffer)
    for hook in list(accumulation_hooks(parameter)):
        hook(parameter)
