"""The two products of tensor parallelism as functions of plain tensors and a group.

:func:`column_product` splits the output features of its weights over the group, and :func:`row_product` splits the
input features of its weight, so that a pair of them needs a single reduction (Megatron-LM, Shoeybi et al. 2019). Under
sequence parallelism (Korthikanti et al. 2022) hidden states between such pairs are split along the sequence: a column
product gathers them and a row product scatters them. Weights are matrices here; parameters and placements are in
:mod:`megastack.layers.linear`. In a training step weight gradients are accumulated in place. If the pipeline splits
backwards, they are deferred together with the gather of their input (:mod:`megastack.weight_gradients`).

Shapes: inputs and outputs are ``(…, S, features)``; B microbatch, S sequence, D hidden, t the size of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megastack.comm.autograd import reduce_from_, scatter_to
from megastack.comm.collectives import (
    Pending,
    all_gather,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from megastack.comm.group import AxisGroup
from megastack.errors import PlacementError
from megastack.layers.autocast import autocast_off, in_own_dtypes, product_dtype
from megastack.layers.compiled_ops import compiled_column_product, compiled_row_product
from megastack.layers.kernels import add_product_
from megastack.weight_gradients import GradientTarget, target_of

SEQUENCE_DIM = -2


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
    shapes = [weight.shape[:-1] for weight in weights]
    weights = [weight.flatten(0, -2) for weight in weights]
    x, weights, biases = _operands(x, weights, [None if bias is None else bias.flatten() for bias in biases])
    if group.size == 1:
        outputs = tuple(_local_product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    else:
        targets = [target_of(weight) for weight in weights], [_bias_target(bias) for bias in biases]
        outputs = _ColumnProduct.apply(x, group, sequence_parallel, targets, *weights, *biases)
    return tuple(
        out if len(shape) == 1 else out.unflatten(-1, shape) for out, shape in zip(outputs, shapes, strict=True)
    )


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
    x, (weight,), (bias,) = _operands(x, [weight], [bias])
    if group.size == 1:
        return _local_product(x, weight, bias)
    partial = _local_product(x, weight, None)
    if sequence_parallel:
        check_sequence(x.shape[SEQUENCE_DIM], group)
        out = scatter_to(partial, group, SEQUENCE_DIM)
    else:
        out = reduce_from_(partial, group)
    if bias is None:
        return out
    target = _bias_target(bias)
    return out + bias if target is None else _AddBias.apply(out, bias, target)


def _operands(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """Input and parameters in the dtype of the product."""
    dtype = product_dtype(x)
    return x.to(dtype), [w.to(dtype) for w in weights], [None if b is None else b.to(dtype) for b in biases]


def rows_of(x: Tensor) -> Tensor:
    """``(…, features)`` as ``(tokens, features)``; a single row if there is no other dim."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def check_dims(x: Tensor, expected: str, *, least: int) -> None:
    """Raise PlacementError for an input with fewer dims than a layer needs; ``expected`` describes its shape."""
    if x.dim() < least:
        raise PlacementError(
            f"input of shape {tuple(x.shape)}: must have at least {least} dim{'s' * (least > 1)}; use {expected}"
        )


def _check_features(x: Tensor, sequence_parallel: bool) -> None:
    check_dims(x, "(…, S, features)" if sequence_parallel else "(…, features)", least=1 + sequence_parallel)


def check_sequence(length: int, group: AxisGroup) -> None:
    """Raise PlacementError for a sequence that cannot be split evenly over the group."""
    if length % group.size:
        raise PlacementError(
            f"sequence length {length}: must be a multiple of {group.axis}={group.size} under sequence parallelism; "
            f"use {length - length % group.size or group.size}, pad it, or turn sequence parallelism off"
        )


def _local_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product on one rank."""
    target = target_of(weight)
    if target is None:
        return F.linear(x, weight, bias)
    product: Tensor = _LocalProduct.apply(x, weight, bias, target, _bias_target(bias))
    return product


class _LocalProduct(torch.autograd.Function):
    """``F.linear`` whose weight gradient is accumulated in place or deferred, and the bias gradient in place."""

    @staticmethod
    @in_own_dtypes
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: GradientTarget,
        bias_target: GradientTarget | None,
    ) -> Tensor:
        ctx.target, ctx.bias_target = target, bias_target
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @in_own_dtypes
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad[:3]
        grad_TO = rows_of(grad)
        grad_x = (grad_TO @ weight).view(x.shape) if needs_input else None
        grad_weight = ctx.target.accumulate(_WeightProduct(grad_TO, _Input(x)))
        return grad_x, grad_weight, _bias_gradient(ctx.bias_target, grad_TO) if needs_bias else None, None, None


class _AddBias(torch.autograd.Function):
    """``x + bias`` whose bias gradient is accumulated in place."""

    @staticmethod
    @in_own_dtypes
    def forward(ctx: Any, x: Tensor, bias: Tensor, target: GradientTarget) -> Tensor:
        ctx.target = target
        return x + bias

    @staticmethod
    @in_own_dtypes
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, _bias_gradient(ctx.target, rows_of(grad)) if ctx.needs_input_grad[1] else None, None


class _ColumnProduct(torch.autograd.Function):
    """The column product, whose collectives overlap with its matrix products.

    Under sequence parallelism backward first starts the second gather of the input, which overlaps with the product for
    the input gradient. The reduction of that gradient then overlaps with the products for the weight gradients.
    """

    @staticmethod
    @in_own_dtypes
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
        ctx.set_materialize_grads(False)  # an unused output costs nothing
        ctx.save_for_backward(x if any(_halves(ctx.needs_input_grad[4:])[0]) else None, *weights)
        whole = all_gather(x, group, SEQUENCE_DIM) if sequence_parallel else x
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    @in_own_dtypes
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group, gathers = ctx.group, ctx.sequence_parallel
        needs_input, needs_weights, needs_biases = _needs(ctx, grads)
        rows = [None if grad is None else rows_of(grad) for grad in grads]
        source = _Input(x, group if gathers else None)
        targets, bias_targets = ctx.targets
        pairs = zip(needs_weights, targets, strict=True)
        if any(needed and (target is None or not target.is_deferring) for needed, target in pairs):
            source.begin()
        reduction = None
        if needs_input:
            places = next(grad.shape[:-1] for grad in grads if grad is not None)
            grad_x = _input_gradient(rows, weights).view(*places, weights[0].shape[1])
            reduction = (
                start_reduce_scatter(grad_x, group, SEQUENCE_DIM) if gathers else start_all_reduce_(grad_x, group)
            )
        grad_weights = [
            _weight_gradient(target, _WeightProduct(row, source)) if row is not None and needed else None
            for row, target, needed in zip(rows, targets, needs_weights, strict=True)
        ]
        grad_biases = [
            _bias_gradient(target, row) if row is not None and needed else None
            for row, target, needed in zip(rows, bias_targets, needs_biases, strict=True)
        ]
        return (None if reduction is None else reduction.wait(), None, None, None, *grad_weights, *grad_biases)


class _Input:
    """The input of weight-gradient products, gathered along the sequence if a group is given.

    Only this rank's slice is kept until the gather.
    """

    def __init__(self, x: Tensor, group: AxisGroup | None = None) -> None:
        self._x, self._group = x, group
        self._whole: Pending | None = None

    def begin(self) -> None:
        """Start the gather; further calls do nothing."""
        if self._whole is None and self._group is not None:
            self._whole = start_all_gather(self._x, self._group, SEQUENCE_DIM)

    def rows(self) -> Tensor:
        """``(tokens, in)``."""
        self.begin()
        return rows_of(self._x if self._whole is None else self._whole.wait())


@dataclass(eq=False, slots=True)
class _WeightProduct:
    """The gradient of a weight, ``grad.T @ input``, from the output gradient ``(tokens, out)``."""

    grad_TO: Tensor
    source: _Input

    def begin(self) -> None:
        """Start the communication that the product needs."""
        self.source.begin()

    def gradient(self) -> Tensor:
        """``(out, in)``."""
        with autocast_off(self.grad_TO):
            return self.grad_TO.T @ self.source.rows()

    def add_to(self, gradient: Tensor) -> None:
        """Accumulate without a temporary tensor for the product."""
        with autocast_off(self.grad_TO):
            add_product_(gradient, self.grad_TO.T, self.source.rows())


def _weight_gradient(target: GradientTarget | None, product: _WeightProduct) -> Tensor | None:
    """The gradient that a backward returns for a weight."""
    return product.gradient() if target is None else target.accumulate(product)


@dataclass(frozen=True, eq=False, slots=True)
class _BiasSum:
    """The gradient of a bias, the sum of output gradients ``(tokens, out)``, in at least fp32."""

    grad_TO: Tensor

    def begin(self) -> None:
        """Does nothing: no data is needed from other ranks."""

    def gradient(self) -> Tensor:
        """``(out,)``."""
        return self.grad_TO.sum(0, dtype=torch.promote_types(self.grad_TO.dtype, torch.float32))

    def add_to(self, gradient: Tensor) -> None:
        """Add the sum."""
        gradient.add_(self.gradient())


def _bias_target(bias: Tensor | None) -> GradientTarget | None:
    return None if bias is None else target_of(bias)


def _bias_gradient(target: GradientTarget | None, grad_TO: Tensor) -> Tensor | None:
    """The gradient that a backward returns for a bias. It is not deferred: the sum costs less than keeping it."""
    total = _BiasSum(grad_TO)
    return total.gradient() if target is None else target.accumulate(total, defers=False)


def _needs(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[bool, Sequence[bool], Sequence[bool]]:
    """Which gradients are needed: of the input, of each weight, of each bias; none for an unused output."""
    used = [grad is not None for grad in grads]
    weights, biases = ([w and u for w, u in zip(half, used, strict=True)] for half in _halves(ctx.needs_input_grad[4:]))
    return ctx.needs_input_grad[0], weights, biases


def _input_gradient(rows: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
    """This rank's part of the input gradient: the sum of the products over the weights."""
    total: Tensor | None = None
    for row, weight in zip(rows, weights, strict=True):
        if row is not None:
            total = row @ weight if total is None else total.addmm_(row, weight)
    assert total is not None, "no output was used"
    return total


def _halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    middle = len(values) // 2
    return values[:middle], values[middle:]
