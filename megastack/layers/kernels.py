"""Elementwise and indexed operations whose fastest implementation depends on the device, and the choice between them.

On a CPU torch's vectorised ``exp`` and ``tanh`` cost more than several passes over memory, so equivalent functions are
computed from cheaper ones. On other devices torch's own kernels are used. Operations that consist of several torch
operations on a CPU, but of one kernel on a GPU, are in :mod:`megastack.layers.fused`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.layers.autocast import Function, autocast_off, once_differentiable

_LOG2_E = math.log2(math.e)
_SLOPE, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715

KernelChoice = Literal["cpu", "device"]
_choice: KernelChoice | None = None  # for all threads: autograd may run a backward on a thread of its own


def cpu_kernels(x: Tensor) -> bool:
    """Whether operations on ``x`` use the implementations for the CPU; every layer asks here."""
    return x.is_cpu if _choice is None else _choice == "cpu"


@contextmanager
def kernel_choice(choice: KernelChoice) -> Iterator[None]:
    """Use the implementations for the CPU or for other devices inside, wherever the tensors are.

    The choice is global to the process, so that backwards on other threads follow it. With ``device`` the other
    implementations run on CPU tensors, as torch operations; dry runs and tests use this. Within an operator of
    :mod:`megastack.layers.fused`, the device of the tensors decides.
    """
    global _choice
    previous, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = previous


def exp_(x: Tensor) -> Tensor:
    """``exp(x)`` in place. On a CPU it is a power of two, which takes half the time of torch's ``exp``."""
    return x.mul_(_LOG2_E).exp2_() if cpu_kernels(x) else x.exp_()


def gelu(x: Tensor) -> Tensor:
    """GPT-2's tanh approximation of the GELU. On a CPU it is computed with the logistic function, without a tanh."""
    return _LogisticGELU.apply(x) if cpu_kernels(x) and x.dtype in _SLOPES else F.gelu(x, approximate="tanh")


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add ``left @ right`` to a matrix of at least their precision, in place.

    Products below fp32 are not rounded. On a CPU their operands are converted, which also takes less time than a
    product in bf16.
    """
    dtype = left.dtype if left.dtype.itemsize >= torch.float32.itemsize else torch.float32
    if total.is_cpu and (cpu_kernels(total) or total.dtype != left.dtype):  # a CPU has no product of two dtypes
        left, right = left.to(dtype), right.to(dtype)
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    if total.dtype == dtype:
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    with autocast_off(left):  # it does not apply to operations in place
        return total.add_(left @ right if left.dtype == dtype else torch.mm(left, right, out_dtype=dtype))


def add_rows_(table: Tensor, index_T: Tensor, rows_TD: Tensor) -> Tensor:
    """Add rows to the rows of a table that ``index_T`` selects, in place and in a fixed order.

    On a CPU they are added one by one. On a GPU ``index_add_`` has no fixed order, so their sum is added as a table.
    Rows of a lower precision than the table are converted, so that no sum is rounded.
    """
    rows_TD = rows_TD.to(table.dtype)
    if cpu_kernels(table):
        return table.index_add_(0, index_T, rows_TD)
    return table.add_(sum_rows(index_T, rows_TD, table.shape[0]))


def sum_rows(index: Tensor, rows: Tensor, size: int) -> Tensor:
    """A table ``(size, D)`` with the sum of the rows for each index: the gradient of an embedding."""
    return torch.ops.aten.embedding_dense_backward(rows, index, size, -1, False)


_SLOPES = {dtype: torch.tensor(_SLOPE, dtype=dtype) for dtype in (torch.float32, torch.float64)}
"""The constant `_SLOPE` as CPU tensors; creating one takes as long as a small pass."""


class _LogisticGELU(Function):
    """``x sigmoid(2 sqrt(2/pi) (x + 0.044715 x³))``, which equals the tanh form; only x is saved.

    Forward takes four passes and allocates only its output. Backward takes seven, and allocates one tensor besides the
    gradient that it returns.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _gelu_sigmoid(x).mul_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = _gelu_sigmoid(x)
        slope = torch.addcmul(_SLOPES[x.dtype], x, x, value=3 * _SLOPE * _CUBE)
        torch.ops.aten.sigmoid_backward(slope, sigmoid, grad_input=slope)
        return sigmoid.addcmul_(slope, x).mul_(grad)


def _gelu_sigmoid(x: Tensor) -> Tensor:
    return torch.addcmul(_SLOPES[x.dtype], x, x, value=_SLOPE * _CUBE).mul_(x).sigmoid_()
