"""Collectives as ``torch.library`` operators, which stay whole in compiled code.

The functions of :mod:`megastack.comm.collectives` call them while ``torch.compile`` traces. The implementation is that
same function, which runs when the compiled code does: counters and the flight recorder see the operation as usual.
Compiled code refers to the group by its handle.

Operators have no side effect that a compiler has to know, so it may recompute or move them like any other. Ranks of a
group compile the same graph and hence issue them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megastack.comm.collectives import all_gather, all_reduce, reduce_scatter
from megastack.comm.group import group_of

_LIBRARY = torch.library.Library("megastack", "FRAGMENT")


def define_operator(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> str:
    """Register an operator of the package.

    Args:
        schema: its name and signature.
        run: the implementation, for all devices.
        fake: the implementation for tensors without data.

    Returns:
        The qualified name.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megastack::{name}", fake, lib=_LIBRARY)
    return f"megastack::{name}"


def define_gradient(name: str, backward: Callable[..., object], setup: Callable[..., None]) -> None:
    """Register the backward of an operator; see ``torch.library.register_autograd``."""
    torch.library.register_autograd(name, backward, setup_context=setup, lib=_LIBRARY)


def scaled(shape: Sequence[int], dim: int, *, times: int = 1, over: int = 1) -> list[int]:
    """A shape with the size of one dim multiplied, or divided."""
    sizes = list(shape)
    sizes[dim] = sizes[dim] * times // over
    return sizes


define_operator(
    "all_reduce(Tensor x, str group, str op) -> Tensor",
    lambda x, group, op: all_reduce(x, group_of(group), op),
    lambda x, group, op: x.new_empty(x.shape),
)


def _gathered(x: Tensor, group: str, dim: int) -> Tensor:
    return all_gather(x, group_of(group), dim).contiguous()


define_operator(
    "all_gather(Tensor x, str group, int dim) -> Tensor",
    _gathered,
    lambda x, group, dim: x.new_empty(scaled(x.shape, dim, times=group_of(group).size)),
)

define_operator(
    "reduce_scatter(Tensor x, str group, int dim) -> Tensor",
    lambda x, group, dim: reduce_scatter(x, group_of(group), dim),
    lambda x, group, dim: x.new_empty(scaled(x.shape, dim, over=group_of(group).size)),
)
