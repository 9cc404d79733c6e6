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


OWN_CODE = (
    "its input is right on every rank: its own code depends on the rank, or takes this rank's part (an index, a size, "
    "a mean, the rows of a parameter) for the whole"
)
"""What is left to say of a wrong output if the module repeats its output on one rank and no signature fits."""


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


def factor_cause(
    ratios: Sequence[float], degrees: Mapping[str, int], tensors: Sequence[tuple[Tensor, Tensor]] = ()
) -> str | None:
    """The likely cause of values that are a whole multiple, or a whole part, of the reference on every rank.

    Args:
        ratios: of each rank's value to the reference.
        degrees: of the axes; all whose degree fits are named.
        tensors: the values and the reference where they are tensors; each element has to follow the ratio then.
    """
    for degree in sorted({degree for degree in degrees.values() if degree > 1}):
        axes = " or ".join(axis for axis, size in degrees.items() if size == degree)
        for factor in (float(degree), 1 / degree):
            if not all(abs(ratio / factor - 1) < CLOSE for ratio in ratios):
                continue
            if not all(close(actual, factor * expected) for actual, expected in tensors):
                continue
            if factor > 1:
                return (
                    f"it is exactly {degree} times the reference, and the degree of {axes} is {degree}: most likely "
                    f"summed over {axes} once too often"
                )
            return (
                f"it is exactly 1/{degree} of the reference, and the degree of {axes} is {degree}: most likely a sum "
                f"over {axes} is missing"
            )
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
        return (
            f"it is exactly {degree} times the reference, and tp is {degree}: most likely summed over tp what is whole "
            "already"
        )
    if _are_whole(expected) and close(_sum(copies), expected[0]):
        return (
            "missing reduction over tp: the sum over the ranks is the reference; end with a RowParallelLinear, or with "
            "megastack.comm.autograd.reduce_from"
        )
    return OWN_CODE


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
    return f"{where}: the fault is in its own code, for example a collective whose backward is not its conjugate"


def _sum(copies: Sequence[Tensor]) -> Tensor:
    return torch.stack([copy.double() for copy in copies]).sum(0)


def _is_multiple(copies: Sequence[Tensor], expected: Sequence[Tensor], degree: int) -> bool:
    return all(close(copy, degree * piece) for copy, piece in zip(copies, expected, strict=True))


def _are_whole(expected: Sequence[Tensor]) -> bool:
    """Whether every rank should have the same."""
    return all(close(piece, expected[0]) for piece in expected)
