"""The norm of the whole gradient over all axes, each element counted once, and clipping by it.

Every rank adds the squares of the shards that it owns, and one scalar is summed over ranks: over ``pp`` and ``tp`` if
the ranks of dp and cp hold identical gradients, over all ranks otherwise (ZeRO). Ranks without a parameter contribute
zero. A plain fp32 sum over a large bucket has a relative error of 1e-4. On a GPU squares are therefore summed in fp64.
On a CPU rows of 1024 squares are summed in the gradients' dtype and the rows in fp64, which takes a tenth of the time
and has an error of 1e-9; there an fp32 gradient beyond 1e19, whose square overflows, counts as non-finite.

A training step does not scale the gradients itself: the update divides them by :func:`clip_divisor`.

A non-finite value anywhere, even in a replica that is not counted, makes the norm non-finite on every rank. This module
reads no tensor on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megastack.comm.collectives import all_reduce
from megastack.gradients.interface import Gradients
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.torch_private import foreach_div_, foreach_norm

EPSILON = 1e-6
"""Added to the norm in the denominator, as in ``torch.nn.utils.clip_grad_norm_``."""
_ROW = 1024


def grad_norm(buckets: Gradients, mesh: Mesh) -> Tensor:
    """The 2-norm of the gradient of all parameters of the model: an fp64 scalar, identical on every rank.

    Communicates one all-reduce of 8 bytes over ``pp·tp``, or over all ranks if data ranks hold different shards. Must
    be called on every rank, after :meth:`Gradients.finish`.
    """
    among_data = buckets.differ_over_data
    owned: list[Tensor] = []
    others: list[Tensor] = []
    for shard in buckets.buckets:
        if shard.local_gradients.numel():
            (owned if shard.reduction.is_owner(among_data=among_data) else others).append(shard.local_gradients)
    norms = _norms([*owned, *others], mesh.device)
    own, other = norms.split([len(owned), len(others)])
    total = own.dot(own)
    if others:
        total = torch.add(total, other.sum(), alpha=0.0)  # keeps a NaN
    return all_reduce(total, mesh.world if among_data else mesh[Axis.PP, Axis.TP]).sqrt()


def clip_divisor(norm: Tensor, max_norm: float | None) -> Tensor | None:
    """What the gradients are divided by: ``max(1, (norm + 1e-6) / max_norm)``, the reciprocal of torch's formula.

    1 for a non-finite norm, after which the step must be skipped (:func:`is_nonfinite`). ``None`` without ``max_norm``.
    """
    if max_norm is None:
        return None
    return ((norm + EPSILON) / max_norm).clamp(min=1.0).nan_to_num(nan=1.0, posinf=1.0)


def clip_gradients_(buckets: Gradients, max_norm: float | None, mesh: Mesh) -> Tensor:
    """Divide all gradients by :func:`clip_divisor`, so that their norm is at most ``max_norm``.

    Args:
        buckets: the gradients, after :meth:`Gradients.finish`.
        max_norm: the largest norm; with ``None`` the norm is only computed.
        mesh: the mesh.

    Returns:
        The norm before clipping. If it is not finite, the gradients are unchanged.
    """
    norm = grad_norm(buckets, mesh)
    divisor = clip_divisor(norm, max_norm)
    if divisor is not None:
        divide_([shard.local_gradients for shard in buckets.buckets], divisor)
    return norm


def divide_(gradients: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide all tensors by a scalar tensor, with one operation per dtype."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        foreach_div_([gradient for gradient in gradients if gradient.dtype == dtype], divisor.to(dtype))


def is_nonfinite(norm: Tensor) -> Tensor:
    """1.0 if the norm is not finite, else 0.0: the ``found_inf`` argument of :meth:`Optimizer.step`."""
    return (~torch.isfinite(norm)).to(torch.float32)


def _norms(gradients: list[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of each, in fp64."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return torch.stack(_norms_by_row(gradients) if device.type == "cpu" else _norms_at_once(gradients))


def _norms_at_once(gradients: list[Tensor]) -> list[Tensor]:
    return foreach_norm(gradients, torch.float64)


def _norms_by_row(gradients: list[Tensor]) -> list[Tensor]:
    return [_sum_of_squares(flat).sqrt() for flat in gradients]


def _sum_of_squares(flat: Tensor) -> Tensor:
    rows = flat.numel() // _ROW * _ROW
    total = torch.linalg.vector_norm(flat[rows:]).double().square()
    if rows:
        total = total + torch.linalg.vector_norm(flat[:rows].view(-1, _ROW), dim=1).double().square().sum()
    return total
