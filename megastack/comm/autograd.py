"""Differentiable collectives, as three conjugate pairs.

Under tensor parallelism a tensor is *replicated* (the values and the gradient are identical on every rank of the
group), *partial* (the value is the sum over the ranks) or *split* along a dim. Each function converts a tensor from one
state to another, and its backward converts the gradient in the opposite direction:

==================================  ================================  ======================
forward                             backward                          sends, per rank
==================================  ================================  ======================
:func:`copy_to`: identity           :func:`reduce_from`: all-reduce   0 / 2 (n-1)/n · S
:func:`reduce_from`: all-reduce     :func:`copy_to`: identity         2 (n-1)/n · S / 0
:func:`gather_from`: all-gather     :func:`scatter_to`                (n-1)/n · S both ways
:func:`scatter_to`: reduce-scatter  :func:`gather_from`               (n-1)/n · S both ways
:func:`slice_to`: local slice       :func:`gather_replicated`         0 / (n-1)/n · S
:func:`gather_replicated`: gather   :func:`slice_to`                  (n-1)/n · S / 0
==================================  ================================  ======================

``S`` is the whole (gathered) tensor. The choice between :func:`gather_from` and :func:`gather_replicated` depends on
the next operation. After the first, ranks do different work on the whole tensor (a column-parallel product), so its
gradient is partial. After the second, all ranks do the same work, so the gradient is complete and each rank needs only
its slice.

The conjugate operators follow Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022 for the split sequence). A
group of one rank returns its input and adds no node to the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megastack.comm.collectives import all_gather, all_reduce, reduce_scatter, start_all_reduce_
from megastack.comm.group import AxisGroup


def copy_to(x: Tensor, group: AxisGroup) -> Tensor:
    """The replicated ``x``, for different work on each rank; the gradient is summed over the group."""
    return x if group.size == 1 else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: AxisGroup) -> Tensor:
    """The sum of the partial ``x`` over the group, replicated; the gradient is unchanged."""
    return x if group.size == 1 else _ReduceFrom.apply(x, group)


def reduce_from_(x: Tensor, group: AxisGroup) -> Tensor:
    """:func:`reduce_from` in place, for a partial ``x`` that the caller owns and no operation has saved."""
    if torch.compiler.is_compiling():  # a compiler decides by itself what is computed in place
        return reduce_from(x, group)
    return x if group.size == 1 else _ReduceFrom_.apply(x, group)


def gather_from(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """The pieces of ``x`` joined along ``dim``, for different work on each rank; the gradient is reduce-scattered."""
    return x if group.size == 1 else _GatherFrom.apply(x, group, dim)


def scatter_to(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """This rank's piece along ``dim`` of the sum of the partial ``x``; the gradient is gathered."""
    return x if group.size == 1 else _ScatterTo.apply(x, group, dim)


def slice_to(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """This rank's piece along ``dim`` of the replicated ``x``; the gradient is gathered."""
    return x if group.size == 1 else _SliceTo.apply(x, group, dim)


def gather_replicated(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """The pieces of ``x`` joined along ``dim``, for the same work on each rank; the gradient is sliced."""
    return x if group.size == 1 else _GatherReplicated.apply(x, group, dim)


# The backward of each function calls its conjugate, so second derivatives work too.


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from(grad, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_to(grad, ctx.group), None


class _ReduceFrom_(_ReduceFrom):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(x)
        return start_all_reduce_(x, group).wait()


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scatter_to(grad, ctx.group, ctx.dim), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_from(grad, ctx.group, ctx.dim), None, None


class _SliceTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        assert x.shape[dim] % group.size == 0, f"dim {dim} of {tuple(x.shape)} is not a multiple of {group.size}"
        return x.chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_replicated(grad, ctx.group, ctx.dim), None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return slice_to(grad, ctx.group, ctx.dim), None, None
