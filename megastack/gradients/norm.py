"""The norm of the whole gradient, over all axes, each unique element once; and clipping by it.

Every rank adds the squares of the buckets that count on it, and one scalar is summed over ``pp`` and ``tp`` (after the
reduction the gradients are equal along ``dp`` and ``cp``). Under ZeRO a rank has the sum of its slices alone: it adds
their squares, and the scalar is summed over all ranks. Ranks without a parameter take part with zero. Squares are
summed in rows of 1024 elements in the gradients' own dtype and the rows in fp64: a plain fp32 sum over a large bucket
is wrong by 1e-4 of the norm, this one by 1e-9. An fp32 gradient beyond 1e19, whose square overflows, counts as not
finite.

A value that is not finite anywhere, in a copy that is not counted as well, makes the norm not finite on every rank.
Nothing here reads a tensor on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megastack.comm.collectives import all_reduce
from megastack.gradients.interface import Gradients, Slice
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis

EPSILON = 1e-6
"""Added to the norm before it divides, as in ``torch.nn.utils.clip_grad_norm_``."""
_ROW = 1024


def grad_norm(buckets: Gradients, mesh: Mesh) -> Tensor:
    """The 2-norm of the gradient of all parameters of the model: an fp64 scalar, alike on every rank.

    One all-reduce of 8 bytes over ``pp·tp``, or over all ranks where slices are shared. Every rank calls, after
    :meth:`Gradients.finish`.
    """
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for bucket in buckets.buckets:
        total = total + _share(bucket)
    group = mesh.world if buckets.sharding.shard.size > 1 else mesh[Axis.PP, Axis.TP]
    return all_reduce(total, group).sqrt()


def clip_gradients_(buckets: Gradients, max_norm: float | None, mesh: Mesh) -> Tensor:
    """Scale all gradients by ``min(1, max_norm / (norm + 1e-6))``, torch's formula; returns the norm before.

    A norm that is not finite leaves the gradients alone: the step is to be skipped (:func:`is_nonfinite`).

    Args:
        buckets: after :meth:`Gradients.finish`.
        max_norm: the largest norm; ``None`` only computes it.
        mesh: the mesh.
    """
    norm = grad_norm(buckets, mesh)
    if max_norm is None:
        return norm
    coefficient = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    coefficient = torch.where(torch.isfinite(norm), coefficient, torch.ones_like(coefficient))
    for bucket in buckets.buckets:
        bucket.local_gradients.mul_(coefficient.to(bucket.local_gradients.dtype))
    return norm


def is_nonfinite(norm: Tensor) -> Tensor:
    """1.0 where the norm is not finite, else 0.0: what :meth:`Optimizer.step` takes as ``found_inf``."""
    return (~torch.isfinite(norm)).to(torch.float32)


def _share(bucket: Slice) -> Tensor:
    """What a bucket adds to the sum of squares: nothing if another copy counts, unless this one is not finite."""
    squares = _sum_of_squares(bucket.local_gradients)
    return squares if bucket.is_owner else squares * 0.0


def _sum_of_squares(flat: Tensor) -> Tensor:
    rows = flat.numel() // _ROW * _ROW
    total = torch.linalg.vector_norm(flat[rows:]).double().square()
    if rows:
        total = total + torch.linalg.vector_norm(flat[:rows].view(-1, _ROW), dim=1).double().square().sum()
    return total
