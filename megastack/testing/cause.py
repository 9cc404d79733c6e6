"""From numbers to a likely cause: what the values on the ranks of a tensor-parallel group tell about a mistake.

Two wrong declarations leave a signature on a gradient: undeclared, the ranks differ and their sum is the reference;
declared on a gradient that is whole already, it is exactly t times too large. Forwards have theirs: a sum that is
missing, a sum too many, a bias that was added by every rank before the sum.

Everything here is arithmetic on tensors that were collected before; no ranks are involved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megastack.mesh.shape import Axis
from megastack.placement.placement import Placement

CLOSE = 1e-7
"""How near, relative to the largest element, numbers must come to a signature."""


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree well enough to tell a cause from."""
    if a.shape != b.shape or not a.numel():
        return False
    difference = float((a.double() - b.double()).abs().max())
    return difference <= CLOSE * max(float(b.double().abs().max()), 1e-300)


def gradient_cause(name: str, placement: Placement, copies: Sequence[Tensor], expected: Tensor) -> str | None:
    """The likely cause of a wrong gradient of a parameter that every tp rank holds whole.

    Args:
        name: the parameter.
        placement: as it is declared.
        copies: the gradient on each rank of one tensor-parallel group, after all reductions.
        expected: the reference.
    """
    degree = len(copies)
    if degree == 1 or Axis.TP in placement.shards:
        return None
    owner, _, local = name.rpartition(".")
    if Axis.TP not in placement.partial and close(_sum(copies), expected):
        return (
            "undeclared partial gradient over tp: each rank has a part, and the sum of the parts is the reference; "
            f'placements() of {owner or "the model"} must say "{local}": Placement(…, partial=frozenset({{Axis.TP}}))'
        )
    if Axis.TP in placement.partial and all(close(copy, degree * expected) for copy in copies):
        return (
            f"declared partial over tp on a full gradient: it is exactly {degree} times the reference, and tp is "
            f'{degree}; placements() of {owner or "the model"} must not declare "{local}" partial here'
        )
    return None


def factor_cause(ratios: Sequence[float], degrees: Mapping[str, int]) -> str | None:
    """The likely cause of values that are a whole multiple, or a whole part, of the reference on every rank."""
    for axis, degree in degrees.items():
        if degree > 1 and all(abs(ratio / degree - 1) < CLOSE for ratio in ratios):
            return (
                f"summed over {axis} once too often: it is exactly {degree} times the reference, and {axis} is {degree}"
            )
        if degree > 1 and all(abs(ratio * degree - 1) < CLOSE for ratio in ratios):
            return f"a sum over {axis} is missing: it is exactly 1/{degree} of the reference, and {axis} is {degree}"
    return None


def output_cause(copies: Sequence[Tensor], expected: Sequence[Tensor], vectors: Mapping[str, Tensor]) -> str | None:
    """The likely cause of a wrong output of a module whose inputs are right.

    Args:
        copies: the output on each rank of one tensor-parallel group.
        expected: the reference, cut as each rank's output is.
        vectors: the replicated one-dimensional parameters of the module, by name, as they were in this forward.
    """
    degree = len(copies)
    if degree == 1:
        return None
    for name, vector in vectors.items():
        if vector.shape[0] == copies[0].shape[-1] and all(
            close(copy - vector * (degree - 1), piece) for copy, piece in zip(copies, expected, strict=True)
        ):
            return (
                f"{name.rpartition('.')[2]} added before the reduction: the output is off by exactly {degree - 1} × "
                f"{name}, and tp is {degree}; add it after the sum over tp"
            )
    if _is_multiple(copies, expected, degree):
        return f"summed over tp what is whole already: it is exactly {degree} times the reference, and tp is {degree}"
    if _are_whole(expected) and close(_sum(copies), expected[0]):
        return (
            "missing reduction over tp: the sum over the ranks is the reference; end with a RowParallelLinear, or with "
            "megastack.comm.autograd.reduce_from"
        )
    return "what it takes in is right: in its own code, something works on this rank's part as if it were the whole"


def backward_cause(module: str, copies: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """What to say of a module that gets the right gradient and passes on a wrong one."""
    where = f"the gradient is right where it enters {module} and wrong where it leaves it"
    degree = len(copies)
    if degree > 1 and _are_whole(expected) and close(_sum(copies), expected[0]):
        return (
            f"{where}: each rank of tp passes on its own part, and their sum is the reference; take the input through "
            "megastack.comm.autograd.copy_to, or begin with a ColumnParallelLinear"
        )
    if degree > 1 and _is_multiple(copies, expected, degree):
        return f"{where}: it is exactly {degree} times the reference, and tp is {degree}; it is summed once too often"
    return f"{where}: the backward of one of its collectives is not the conjugate of its forward"


def _sum(copies: Sequence[Tensor]) -> Tensor:
    return torch.stack([copy.double() for copy in copies]).sum(0)


def _is_multiple(copies: Sequence[Tensor], expected: Sequence[Tensor], degree: int) -> bool:
    return all(close(copy, degree * piece) for copy, piece in zip(copies, expected, strict=True))


def _are_whole(expected: Sequence[Tensor]) -> bool:
    """Whether every rank should have the same."""
    return all(close(piece, expected[0]) for piece in expected)
