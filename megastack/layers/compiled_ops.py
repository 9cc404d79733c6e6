"""The products of :mod:`megastack.layers.linear_ops` in compiled code: operators that run forward and backward whole.

A compiler cannot trace the eager products. They start collectives and wait for them later, report to counters and the
flight recorder, and accumulate weight gradients in place or defer them, depending on the state of the step. Here each
direction is one ``torch.library`` operator, whose implementation does all of that when the compiled code runs, with the
same overlap. It costs no fusion: matrix products are library calls in compiled code, too.

An operator gets parameters as they are. It accumulates their gradients, deferred or not, and returns none, so the
compiled backward returns none either; autograd then runs the parameter's accumulation hooks as usual. The gradient of a
weight that is cast or computed is returned, and so is every gradient if the input needs none: nothing would use the
result of the operator, and the compiler would remove it.

Compiled code holds neither groups nor scopes. It refers to a group by its handle, and :func:`bind_parameters` records
in which scope of :mod:`megastack.weight_gradients` a block runs, since a backward may run on another thread.

Operands of deferred products outlive the compiled code that computed them, so this code must not reuse their memory;
:class:`megastack.models.compile.CompiledBlocks` sees to that.

Shapes: inputs are ``(…, S, features)``, weights ``(*out, in)``; B microbatch, S sequence, t the size of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megastack.comm.collectives import (
    all_gather,
    reduce_scatter,
    start_all_reduce_,
    start_reduce_scatter,
)
from megastack.comm.group import AxisGroup, group_of
from megastack.comm.library_ops import define_gradient, define_operator, scaled
from megastack.errors import ConfigError
from megastack.layers.autocast import product_dtype
from megastack.layers.weight_products import SEQUENCE_DIM, BiasSum, ProductInput, WeightProduct, rows_of
from megastack.torch_private import has_gradient_hooks
from megastack.weight_gradients import (
    HAS_GRAD_DTYPE,
    GradientTarget,
    WeightGradient,
    WeightGradientScope,
    current_scope,
)

_SCOPES = WeakTensorKeyDictionary()
"""The scope of each parameter of a compiled block."""


def bind_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Let the next backward through these parameters accumulate or defer gradients as the current scope says.

    Called before each forward of compiled code that uses them.

    Raises:
        ConfigError: a parameter has a hook on its gradient, which autograd would call without one.
    """
    scope = current_scope() or WeightGradientScope(0)
    for parameter in parameters:
        if has_gradient_hooks(parameter):
            raise ConfigError(
                f"compile=true: a parameter of shape {tuple(parameter.shape)} has a hook on its gradient, which a "
                "compiled block accumulates itself; use register_post_accumulate_grad_hook or compile=false"
            )
        _SCOPES[parameter] = scope


# While a compiler traces.


def compiled_column_product(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: AxisGroup,
    *,
    sequence_parallel: bool = False,
) -> tuple[Tensor, ...]:
    """As :func:`megastack.layers.linear_ops.column_product`, in compiled code."""
    x, parameters, options = _operands(x, weights, biases)
    outputs = torch.ops.megastack.column_product(x, *parameters, *options, group.handle, sequence_parallel)
    return tuple(outputs)


def compiled_row_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: AxisGroup, *, sequence_parallel: bool = False
) -> Tensor:
    """As :func:`megastack.layers.linear_ops.row_product`, in compiled code."""
    x, parameters, options = _operands(x, [weight], [bias])
    outputs = torch.ops.megastack.row_product(x, *parameters, *options, group.handle, sequence_parallel)
    return outputs[0]


def _operands(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]], tuple[list[bool], list[bool]]]:
    """Operands in the dtype of the product, which weights have a bias, and which operands are parameters."""
    dtype = product_dtype(x)
    biased = [bias is not None for bias in biases]
    given = [*weights, *(bias for bias in biases if bias is not None)]
    are_parameters = [isinstance(each, nn.Parameter) and each.dtype == dtype for each in given]
    cast = [each if each.dtype == dtype else each.to(dtype) for each in given]
    return x.to(dtype), (cast[: len(weights)], cast[len(weights) :]), (biased, are_parameters)


# Forward.


def _column_product(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], biased: list[bool], *rest: Any
) -> list[Tensor]:
    _, group, sequence_parallel = rest
    whole = all_gather(x, group_of(group), SEQUENCE_DIM) if sequence_parallel else x
    given = iter(biases)
    return [
        _linear(whole, weight, next(given) if has_bias else None)
        for weight, has_bias in zip(weights, biased, strict=True)
    ]


def _row_product(x: Tensor, weights: list[Tensor], biases: list[Tensor], *rest: Any) -> list[Tensor]:
    _, _, group, sequence_parallel = rest
    ranks, (weight,) = group_of(group), weights
    if ranks.size == 1:
        return [_linear(x, weight, *biases)]
    partial = _linear(x, weight)
    if sequence_parallel:
        out = reduce_scatter(partial, ranks, SEQUENCE_DIM)
    else:
        out = start_all_reduce_(partial, ranks).wait()
    return [out.add_(*biases) if biases else out]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``(…, *out)``."""
    out = F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())
    return out.view(*x.shape[:-1], *weight.shape[:-1])


def _column_shapes(x: Tensor, weights: list[Tensor], *rest: Any) -> list[Tensor]:
    group, sequence_parallel = rest[-2:]
    shape = scaled(x.shape, SEQUENCE_DIM, times=group_of(group).size) if sequence_parallel else x.shape
    return [x.new_empty((*shape[:-1], *weight.shape[:-1])) for weight in weights]


def _row_shapes(x: Tensor, weights: list[Tensor], *rest: Any) -> list[Tensor]:
    group, sequence_parallel = rest[-2:]
    shape = scaled(x.shape, SEQUENCE_DIM, over=group_of(group).size) if sequence_parallel else x.shape
    return [x.new_empty((*shape[:-1], *weights[0].shape[:-1]))]


# Backward. Its operators return the gradient of the input, if needed, and then those of the parameters that autograd
# accumulates.


@dataclass
class _Parameters:
    """Weights and biases of a product, and what to do with each gradient."""

    weights: list[Tensor]
    biases: list[Tensor]
    biased: list[bool]
    accumulated: list[bool]
    returned: list[bool]

    def gradients(self, weight_rows: list[Tensor], bias_rows: list[Tensor], source: ProductInput) -> list[Tensor]:
        """Accumulate or defer gradients, and return the rest, which autograd accumulates."""
        products: list[WeightGradient] = [
            WeightProduct(rows, source, weight.shape) for rows, weight in zip(weight_rows, self.weights, strict=True)
        ]
        biased_rows = compress(bias_rows, self.biased)
        sums = [BiasSum(rows, bias.shape) for rows, bias in zip(biased_rows, self.biases, strict=True)]
        returned = []
        for index, (parameter, gradient) in enumerate(
            zip([*self.weights, *self.biases], [*products, *sums], strict=True)
        ):
            if self.accumulated[index]:
                _accumulate(parameter, gradient, defers=index < len(self.weights))
            if self.returned[index]:
                returned.append(gradient.gradient().to(parameter.dtype))
        return returned

    def use_input_now(self) -> bool:
        """Whether the gradient of a weight is computed in this backward."""
        count = len(self.weights)
        return any(self.returned[:count]) or any(
            accumulates and _SCOPES[weight].deferred is None
            for weight, accumulates in zip(self.weights, self.accumulated[:count], strict=True)
        )


def _column_backward(
    grads: list[Tensor], x: Tensor | None, weights: list[Tensor], biases: list[Tensor], *options: Any
) -> list[Tensor]:
    *flags, needs_input, group, sequence_parallel = options
    ranks, parameters = group_of(group), _Parameters(weights, biases, *flags)
    rows = [_rows(grad, weight) for grad, weight in zip(grads, weights, strict=True)]
    source = ProductInput(x, ranks if sequence_parallel else None)
    if parameters.use_input_now():
        source.begin()
    reduction = None
    if needs_input:
        places = grads[0].shape[: 1 - weights[0].dim()]
        grad_x = _input_gradient(rows, weights).view(*places, weights[0].shape[-1])
        if sequence_parallel:
            reduction = start_reduce_scatter(grad_x, ranks, SEQUENCE_DIM)
        else:
            reduction = start_all_reduce_(grad_x, ranks)
    gradients = parameters.gradients(rows, rows, source)
    return gradients if reduction is None else [reduction.wait(), *gradients]


def _row_backward(
    grads: list[Tensor], x: Tensor | None, weights: list[Tensor], biases: list[Tensor], *options: Any
) -> list[Tensor]:
    *flags, needs_input, group, sequence_parallel = options
    (grad,), parameters = grads, _Parameters(weights, biases, *flags)
    whole = all_gather(grad, group_of(group), SEQUENCE_DIM) if sequence_parallel else grad
    rows = [_rows(whole, weights[0])]
    grad_x = []
    if needs_input:
        grad_x = [_input_gradient(rows, weights).view(*whole.shape[:-1], weights[0].shape[-1])]
    bias_rows = [_rows(grad, weights[0])] if biases else rows
    return [*grad_x, *parameters.gradients(rows, bias_rows, ProductInput(x))]


def _input_gradient(rows: list[Tensor], weights: list[Tensor]) -> Tensor:
    """``(tokens, in)``: the sum of the products over the weights."""
    total = rows[0] @ weights[0].flatten(0, -2)
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total.addmm_(row, weight.flatten(0, -2))
    return total


def _rows(grad: Tensor, weight: Tensor) -> Tensor:
    """An output gradient ``(…, *out)`` as ``(tokens, outputs)``."""
    return rows_of(grad.flatten(1 - weight.dim()))


def _accumulate(parameter: Tensor, product: WeightGradient, *, defers: bool) -> None:
    """Accumulate or defer a gradient of a parameter, if the running backward accumulates it.

    ``torch.autograd.grad`` does not; asked for the parameter's gradient, it raises an error.
    """
    target = GradientTarget(parameter, parameter, _SCOPES[parameter], is_cast=False)
    if not target.is_accumulated:
        return
    gradient = target.accumulate(product, defers=defers)
    if gradient is None:
        return
    if parameter.grad is None:
        dtype = parameter.grad_dtype if HAS_GRAD_DTYPE else parameter.dtype
        parameter.grad = gradient.to(dtype or gradient.dtype)
    else:
        parameter.grad.add_(gradient)


def _backward_shapes(column: bool) -> Any:
    """The fake implementation of a backward."""

    def fake(grads: list[Tensor], x: Tensor | None, weights: list[Tensor], biases: list[Tensor], *rest: Any) -> Any:
        _, _, returned, needs_input, group, sequence_parallel = rest
        weight, factor = weights[0], group_of(group).size if sequence_parallel else 1
        shape = [*grads[0].shape[: 1 - weight.dim()], weight.shape[-1]]
        if factor > 1:
            shape = scaled(shape, SEQUENCE_DIM, **{"over" if column else "times": factor})
        gradients = [p.new_empty(p.shape) for p, r in zip([*weights, *biases], returned, strict=True) if r]
        return [grads[0].new_empty(shape), *gradients] if needs_input else gradients

    return fake


# Registration.

_FORWARD = "(Tensor x, Tensor[] weights, Tensor[] biases, bool[] biased, bool[] are_parameters, str group, bool sp)"
_BACKWARD = (
    "(Tensor[] grads, Tensor? x, Tensor[] weights, Tensor[] biases, bool[] biased, bool[] accumulated, bool[] returned,"
    " bool needs_input, str group, bool sp)"
)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, biases, *ctx.options = inputs
    ctx.count = len(weights)
    ctx.save_for_backward(x, *weights, *biases)


def _gradients(backward: Any, ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    x, *parameters = ctx.saved_tensors
    weights, biases = parameters[: ctx.count], parameters[ctx.count :]
    biased, are_parameters, group, sequence_parallel = ctx.options
    needs_input, needs_weights, needs_biases = ctx.needs_input_grad[:3]
    needed = [*needs_weights, *needs_biases]
    accumulated = [need and needs_input and own for need, own in zip(needed, are_parameters, strict=True)]
    returned = [need and not own for need, own in zip(needed, accumulated, strict=True)]
    options = (biased, accumulated, returned, needs_input, group, sequence_parallel)
    found = iter(backward(list(grads), x if any(needs_weights) else None, weights, biases, *options))
    grad_x = next(found) if needs_input else None
    given = [next(found) if each else None for each in returned]
    return grad_x, given[: ctx.count], given[ctx.count :], None, None, None, None


def _register(name: str, forward: Any, shapes: Any, backward: Any, backward_shapes: Any) -> None:
    operator = define_operator(f"{name}{_FORWARD} -> Tensor[]", forward, shapes)
    define_operator(f"{name}_backward{_BACKWARD} -> Tensor[]", backward, backward_shapes)
    run = getattr(torch.ops.megastack, f"{name}_backward").default
    define_gradient(operator, lambda ctx, grads: _gradients(run, ctx, grads), _setup)


_register("column_product", _column_product, _column_shapes, _column_backward, _backward_shapes(column=True))
_register("row_product", _row_product, _row_shapes, _row_backward, _backward_shapes(column=False))
