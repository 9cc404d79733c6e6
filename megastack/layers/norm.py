"""Normalisation over the last dim, with a weight that every rank holds whole.

Nothing is communicated here. What matters is the gradient of the replicated weight: where the input is split over tp
(along the sequence, or by heads for the q and k norms), each rank sees only its part of it, and the placement declares
the gradient partial over tp.

fp32 and fp64 inputs are normalised in their own dtype, lower precisions in fp32, and the output has the input's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement, Zeros


class _Norm(ParallelModule):
    """What both norms share: sizes, and where their gradients are partial."""

    weight: nn.Parameter

    def __init__(self, hidden: int, mesh: Mesh, *, eps: float = 1e-5, sequence_parallel: bool = False) -> None:
        super().__init__(mesh)
        self.hidden = hidden
        self.eps = eps
        self.partial = frozenset({Axis.TP} if sequence_parallel else ())
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        """The weight, replicated, one at the start, without weight decay."""
        return {"weight": Placement((self.hidden,), partial=self.partial, init=Ones(), decay=False)}

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}, partial={sorted(self.partial)}"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) · weight`` (Zhang & Sennrich 2019).

    Args:
        hidden: the size of the last dim.
        mesh: the ranks that hold a copy of the weight.
        eps: added to the mean square.
        sequence_parallel: the input is split over tp, so the gradient is partial over it.
    """

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Any shape that ends in ``hidden``."""
        dtype = torch.promote_types(x_BSD.dtype, torch.float32)
        return F.rms_norm(x_BSD.to(dtype), (self.hidden,), self.weight.to(dtype), self.eps).to(x_BSD.dtype)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(variance + eps) · weight + bias`` (Ba et al. 2016).

    Args:
        hidden: the size of the last dim.
        mesh: the ranks that hold a copy of the weight and the bias.
        eps: added to the variance.
        sequence_parallel: the input is split over tp, so both gradients are partial over it.
    """

    bias: nn.Parameter

    def placements(self) -> dict[str, Placement]:
        """The weight and the bias, replicated, one and zero at the start, without weight decay."""
        bias = Placement((self.hidden,), partial=self.partial, init=Zeros(), decay=False)
        return {**super().placements(), "bias": bias}

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Any shape that ends in ``hidden``."""
        dtype = torch.promote_types(x_BSD.dtype, torch.float32)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return F.layer_norm(x_BSD.to(dtype), (self.hidden,), weight, bias, self.eps).to(x_BSD.dtype)
