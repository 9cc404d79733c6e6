"""The norm of the whole gradient over all axes, each element counted once, and clipping by it.

Every rank adds the squares of the shards that it owns, and one scalar is summed over ranks: over ``pp`` and ``tp`` if
the ranks of dp and cp hold identical gradients, over all ranks otherwise (ZeRO). Ranks without a parameter contribute
zero. Squares are summed in rows of 1024 elements in the gradients' dtype, and the rows in fp64. A plain fp32 sum over a
large bucket has a relative error of 1e-4, this one of 1e-9. An fp32 gradient beyond 1e19, whose square overflows,
counts as non-finite.

A non-finite value anywhere, even in a replica that is not counted, makes the norm non-finite on every rank. This module
reads no tensor on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megastack.comm.collectives import all_reduce
from megastack.gradients.interface import Gradients
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis

EPSILON = 1e-6
"""Added to the norm in the denominator, as in ``torch.nn.utils.clip_grad_norm_``."""
_ROW = 1024


def grad_norm(buckets: Gradients, mesh: Mesh) -> Tensor:
    """The 2-norm of the gradient of all parameters of the model: an fp64 scalar, identical on every rank.

    Communicates one all-reduce of 8 bytes over ``pp·tp``, or over all ranks if data ranks hold different shards. Must
    be called on every rank, after :meth:`Gradients.finish`.
    """
    among_data = buckets.differ_over_data
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for shard in buckets.buckets:
        squares = _sum_of_squares(shard.local_gradients)
        total = total + (squares if shard.reduction.is_owner(among_data=among_data) else squares * 0.0)  # keeps a NaN
    return all_reduce(total, mesh.world if among_data else mesh[Axis.PP, Axis.TP]).sqrt()


def clip_gradients_(buckets: Gradients, max_norm: float | None, mesh: Mesh) -> Tensor:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``, torch's formula. Returns the norm before clipping.

    A non-finite norm leaves the gradients unchanged; the step must then be skipped (:func:`is_nonfinite`).

    Args:
        buckets: the gradients, after :meth:`Gradients.finish`.
        max_norm: the largest norm; with ``None`` the norm is only computed.
        mesh: the mesh.
    """
    norm = grad_norm(buckets, mesh)
    if max_norm is None:
        return norm
    coefficient = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    coefficient = torch.where(torch.isfinite(norm), coefficient, torch.ones_like(coefficient))
    for shard in buckets.buckets:
        shard.local_gradients.mul_(coefficient.to(shard.local_gradients.dtype))
    return norm


def is_nonfinite(norm: Tensor) -> Tensor:
    """1.0 if the norm is not finite, else 0.0: the ``found_inf`` argument of :meth:`Optimizer.step`."""
    return (~torch.isfinite(norm)).to(torch.float32)


def _sum_of_squares(flat: Tensor) -> Tensor:
    rows = flat.numel() // _ROW * _ROW
    total = torch.linalg.vector_norm(flat[rows:]).double().square()
    if rows:
        total = total + torch.linalg.vector_norm(flat[:rows].view(-1, _ROW), dim=1).double().square().sum()
    return total
