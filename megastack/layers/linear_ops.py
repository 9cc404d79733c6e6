"""The two products of tensor parallelism as functions of plain tensors and a group.

:func:`column_product` splits the output features of its weights over the group, and :func:`row_product` splits the
input features of its weight, so that a pair of them needs a single reduction (Megatron-LM, Shoeybi et al. 2019). Under
sequence parallelism (Korthikanti et al. 2022) hidden states between such pairs are split along the sequence: a column
product gathers them and a row product scatters them. Placements are in :mod:`megastack.layers.linear`. In a training
step weight gradients are accumulated in place. If the pipeline splits backwards, they are deferred together with the
gather of their input (:mod:`megastack.weight_gradients`).

All products of an input are one autograd node, which takes parameters as they are: each node, and each view of a
parameter outside of it, costs the host as much as launching several kernels.

Shapes: inputs and outputs are ``(…, S, features)``; B microbatch, S sequence, D hidden, t the size of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.comm.autograd import reduce_from_, scatter_to
from megastack.comm.collectives import (
    all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError
from megastack.layers.autocast import Function, in_own_dtypes, once_differentiable, product_dtype
from megastack.layers.compiled_ops import compiled_column_product, compiled_row_product
from megastack.layers.kernels import cpu_kernels
from megastack.layers.weight_products import SEQUENCE_DIM, BiasSum, ProductInput, WeightProduct, matrix_of, rows_of
from megastack.torch_private import unsafe_view
from megastack.weight_gradients import GradientTarget, target_of


def column_product(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: AxisGroup,
    *,
    sequence_parallel: bool = False,
) -> tuple[Tensor, ...]:
    """``x @ weight.T + bias`` for several weights that share an input, each split along an output dim over the group.

    Communicates once for all weights. Forward: nothing, or with ``sequence_parallel`` an all-gather of the input.
    Backward: an all-reduce of the input gradient, or with ``sequence_parallel`` a reduce-scatter of it and a second
    all-gather of the input, of which only this rank's slice is saved; both overlap with the weight gradients.

    Args:
        x: ``(…, S, in)``, replicated over the group, or ``(…, S/t, in)`` with ``sequence_parallel``.
        weights: this rank's part ``(*out, in)`` of each weight, with one output dim or more; frozen ones need no
            product in backward.
        biases: a tensor ``(*out)`` or ``None`` for each weight.

    Parameters are cast to the dtype of ``x``. If ``torch.autocast`` is on, all operands are cast to its dtype.

    Returns:
        One ``(…, S, *out)`` per weight.

    Raises:
        PlacementError: the input has no feature dim, or no sequence dim under sequence parallelism.
    """
    _check_features(x, sequence_parallel)
    if torch.compiler.is_compiling():
        return compiled_column_product(x, weights, biases, group, sequence_parallel=sequence_parallel)
    x, parameters = _operands(x, [*weights, *biases])
    if group.size == 1:
        return _local_products(x, parameters)
    return _ColumnProduct.apply(x, group, sequence_parallel, _targets(parameters), *parameters)


def row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: AxisGroup, *, sequence_parallel: bool = False
) -> Tensor:
    """``x @ weight.T + bias`` with the input features split over the group; the bias is added after the reduction.

    Forward: an all-reduce of the output, or with ``sequence_parallel`` a reduce-scatter of it. Backward: nothing, or
    with ``sequence_parallel`` an all-gather of the output gradient.

    Args:
        x: ``(…, S, in/t)``.
        weight: ``(out, in/t)``.
        bias: ``(out,)``, replicated, or ``None``.

    Returns:
        ``(…, S, out)``, replicated over the group, or ``(…, S/t, out)`` with ``sequence_parallel``.

    Raises:
        PlacementError: S is not a multiple of t under sequence parallelism, or the input lacks a feature or sequence
        dim.
    """
    _check_features(x, sequence_parallel)
    if torch.compiler.is_compiling():
        return compiled_row_product(x, weight, bias, group, sequence_parallel=sequence_parallel)
    x, parameters = _operands(x, [weight, bias])
    if group.size == 1:
        return _local_products(x, parameters)[0]
    weight, bias = parameters
    (partial,) = _local_products(x, [weight, None])
    if sequence_parallel:
        check_sequence(x.shape[SEQUENCE_DIM], group)
        out = scatter_to(partial, group, SEQUENCE_DIM)
    else:
        out = reduce_from_(partial, group)
    if bias is None:
        return out
    target = target_of(bias)
    return out + bias if target is None else _AddBias.apply(out, bias, target)


_Parameters = Sequence[Any]
"""The weights of a product, and as many biases or ``None`` after them."""
_Targets = Sequence[GradientTarget | None]
"""The targets of parameters, in the same order."""


def _operands(x: Tensor, parameters: _Parameters) -> tuple[Tensor, _Parameters]:
    """Input and parameters in the dtype of the product."""
    dtype = product_dtype(x)
    cast = [each if each is None or each.dtype == dtype else each.to(dtype) for each in parameters]
    return x if x.dtype == dtype else x.to(dtype), cast


def _targets(parameters: _Parameters) -> _Targets:
    return [None if each is None else target_of(each) for each in parameters]


def check_dims(x: Tensor, expected: str, *, least: int) -> None:
    """Raise PlacementError for an input with fewer dims than a layer needs; ``expected`` describes its shape."""
    if x.dim() < least:
        raise PlacementError(
            f"input of shape {tuple(x.shape)}: must have at least {least} dim{'s' * (least > 1)}; use {expected}"
        )


def _check_features(x: Tensor, sequence_parallel: bool) -> None:
    if x.dim() <= sequence_parallel:
        check_dims(x, "(…, S, features)" if sequence_parallel else "(…, features)", least=1 + sequence_parallel)


def check_sequence(length: int, group: AxisGroup) -> None:
    """Raise PlacementError for a sequence that cannot be split evenly over the group."""
    if length % group.size:
        raise PlacementError(
            f"sequence length {length}: must be a multiple of {group.axis}={group.size} under sequence parallelism; "
            f"use {length - length % group.size or group.size}, pad it, or turn sequence parallelism off"
        )


def _local_products(x: Tensor, parameters: _Parameters) -> tuple[Tensor, ...]:
    """The products on one rank: one node for all weights, unless autograd accumulates the gradients of some."""
    targets = _targets(parameters)
    if None not in targets[: len(targets) // 2]:
        return _LocalProducts.apply(x, targets, *parameters)
    pairs = zip(zip(*_halves(targets), strict=True), zip(*_halves(parameters), strict=True), strict=True)
    return tuple(_linear(x, *each) if own[0] is None else _LocalProducts.apply(x, own, *each)[0] for own, each in pairs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` with a weight ``(*out, in)``."""
    if weight.dim() == 2:
        return F.linear(x, weight, bias)
    out = F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())
    return unsafe_view(out, (*x.shape[:-1], *weight.shape[:-1]))  # an autograd function may return it


class _LocalProducts(Function):
    """The products of one input; weight gradients are accumulated in place or deferred, bias gradients in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: _Targets, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = _halves(parameters)
        ctx.targets = targets
        ctx.set_materialize_grads(False)  # an unused output costs nothing
        ctx.save_for_backward(x, *weights)
        return tuple(map(_linear, repeat(x), weights, biases))

    @staticmethod
    @in_own_dtypes
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs_input, _, *needed = ctx.needs_input_grad
        outputs = _OutputGradients(grads, weights)
        grad_x = outputs.input_gradient(fused=len(weights) > 1 and not cpu_kernels(x)) if needs_input else None
        return (
            None if grad_x is None else grad_x.view(x.shape),
            None,
            *outputs.parameter_gradients(ProductInput(x), ctx.targets, needed),
        )


class _AddBias(Function):
    """``x + bias`` whose bias gradient is accumulated in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, target: GradientTarget) -> Tensor:
        ctx.target = target
        return x + bias

    @staticmethod
    @in_own_dtypes
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_bias, total = ctx.needs_input_grad[1], BiasSum(rows_of(grad), grad.shape[-1:])
        return grad, ctx.target.accumulate(total, defers=False) if needs_bias else None, None


class _ColumnProduct(Function):
    """The column product, whose collectives overlap with its matrix products.

    Under sequence parallelism backward first starts the second gather of the input, which overlaps with the product for
    the input gradient. The reduction of that gradient then overlaps with the products for the weight gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: AxisGroup,
        sequence_parallel: bool,
        targets: Sequence[GradientTarget | None],
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = _halves(tensors)
        ctx.group, ctx.sequence_parallel, ctx.targets = group, sequence_parallel, targets
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x if any(_halves(ctx.needs_input_grad[4:])[0]) else None, *weights)
        whole = all_gather(x, group, SEQUENCE_DIM) if sequence_parallel else x
        return tuple(map(_linear, repeat(whole), weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group, gathers = ctx.group, ctx.sequence_parallel
        needs_input, _, _, _, *needed = ctx.needs_input_grad
        outputs, source = _OutputGradients(grads, weights), ProductInput(x, group if gathers else None)
        if outputs.compute_weights(ctx.targets, needed):
            source.begin()
        reduction = None
        if needs_input and (grad_x := outputs.input_gradient(fused=True)) is not None:
            places = next(g.shape[: 1 - w.dim()] for g, w in zip(grads, weights, strict=True) if g is not None)
            grad_x = grad_x.view(*places, weights[0].shape[-1])
            reduction = (
                start_reduce_scatter(grad_x, group, SEQUENCE_DIM) if gathers else start_all_reduce_(grad_x, group)
            )
        gradients = outputs.parameter_gradients(source, ctx.targets, needed)
        return (None if reduction is None else reduction.wait(), None, None, None, *gradients)


class _OutputGradients:
    """The gradients of the products of one input.

    Args:
        grads: ``(…, *out)`` for each output, ``None`` for an unused one.
        weights: ``(*out, in)``.
    """

    def __init__(self, grads: Sequence[Tensor | None], weights: Sequence[Tensor]) -> None:
        self._used: list[tuple[int, Tensor, Tensor, torch.Size]] = []
        for place, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
            if grad is not None:
                matrix = matrix_of(weight)
                self._used.append((place, grad.reshape(-1, matrix.shape[0]), matrix, weight.shape))

    def input_gradient(self, *, fused: bool) -> Tensor | None:
        """This rank's part of the input gradient, ``(tokens, in)``: the sum over the weights.

        A ``fused`` sum is one kernel for each weight and does not round the products.
        """
        total: Tensor | None = None
        for _, rows, matrix, _ in self._used:
            if total is None:
                total = rows.mm(matrix)
            elif fused:
                total.addmm_(rows, matrix)
            else:
                total.add_(rows.mm(matrix))
        return total

    def compute_weights(self, targets: _Targets, needed: Sequence[bool]) -> bool:
        """Whether :meth:`parameter_gradients` computes the gradient of a weight, rather than to defer all of them."""
        targets_now = (targets[place] for place, *_ in self._used if needed[place])
        return any(target is None or not target.is_deferring for target in targets_now)

    def parameter_gradients(
        self, source: ProductInput, targets: _Targets, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients that a backward returns; ``None`` if one is not needed, accumulated or deferred.

        Bias gradients are not deferred: a sum costs less than keeping its operand.
        """
        gradients: list[Tensor | None] = [None] * len(needed)
        for weight, rows, _, shape in self._used:
            bias = weight + len(needed) // 2
            if needed[weight]:
                product, target = WeightProduct(rows, source, shape), targets[weight]
                gradients[weight] = product.gradient() if target is None else target.accumulate(product)
            if needed[bias]:
                total, target = BiasSum(rows, shape[:-1]), targets[bias]
                gradients[bias] = total.gradient() if target is None else target.accumulate(total, defers=False)
        return gradients


def _halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    middle = len(values) // 2
    return values[:middle], values[middle:]
