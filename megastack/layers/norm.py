"""Normalisation over the last dim, with replicated parameters.

Nothing is communicated here. If the input is split over tp (along the sequence, or by heads for the query and key
norms), each rank sees only a part of it, so the placement declares the gradients partial over tp.

fp32 and fp64 inputs are normalised in their own dtype, lower precisions in fp32; the output has the input's dtype.
Backward needs the input in its own dtype and one or two numbers per row.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.layers import fused
from megastack.layers.autocast import Function, once_differentiable
from megastack.layers.kernels import cpu_kernels
from megastack.layers.overrides import built_in
from megastack.layers.spec import NormSpec
from megastack.mesh.mesh import Mesh
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Placement
from megastack.torch_private import is_any_autocast_enabled


class _Norm(ParallelModule):
    """A norm with the parameters of its spec."""

    KIND: ClassVar[str]
    weight: nn.Parameter

    def __init__(self, hidden: int, mesh: Mesh, *, eps: float = 1e-5, sequence_parallel: bool = False) -> None:
        super().__init__(mesh)
        self.hidden, self.eps = hidden, eps
        self.spec = NormSpec(hidden, self.KIND, eps, sequence_parallel)
        self.create_parameters()

    @classmethod
    def from_spec(cls, spec: NormSpec, mesh: Mesh) -> Self:
        """The norm of a spec."""
        return cls(spec.hidden, mesh, eps=spec.norm_eps, sequence_parallel=spec.sequence_parallel)

    def placements(self) -> dict[str, Placement]:
        """The weight and, in a LayerNorm, the bias, as the spec declares them."""
        return self.spec.placements(self.mesh.shape.tp)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps}, sp={self.spec.sequence_parallel}"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) · weight`` (Zhang & Sennrich 2019).

    Args:
        hidden: the size of the last dim.
        mesh: the ranks that hold a replica of the weight.
        eps: added to the mean square.
        sequence_parallel: the input is split over tp, so the gradient is partial over it.
    """

    KIND = "rms"

    @built_in
    def forward(self, x_BSD: Tensor) -> Tensor:
        """Accepts any shape that ends in ``hidden``."""
        if torch.compiler.is_compiling():
            return fused.rms_normed(x_BSD, self.weight, self.eps)
        return _RMSNorm.apply(x_BSD, self.weight, self.eps)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(variance + eps) · weight + bias`` (Ba et al. 2016).

    Args:
        hidden: the size of the last dim.
        mesh: the ranks that hold a replica of the weight and the bias.
        eps: added to the variance.
        sequence_parallel: the input is split over tp, so both gradients are partial over it.
    """

    KIND = "layer"
    bias: nn.Parameter

    @built_in
    def forward(self, x_BSD: Tensor) -> Tensor:
        """Accepts any shape that ends in ``hidden``."""
        own_dtype = not cpu_kernels(x_BSD) or x_BSD.dtype == fused.wide_dtype(x_BSD)
        if own_dtype and x_BSD.dtype == self.weight.dtype and not is_any_autocast_enabled():
            return F.layer_norm(x_BSD, (self.hidden,), self.weight, self.bias, self.eps)
        if torch.compiler.is_compiling():
            return fused.layer_normed(x_BSD, self.weight, self.bias, self.eps)
        return _LayerNorm.apply(x_BSD, self.weight, self.bias, self.eps)


class _RMSNorm(Function):
    """RMSNorm that, unlike torch's on a CPU, does not save the normalised input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = fused.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *fused.rms_norm_backward(grad, *ctx.saved_tensors), None


class _LayerNorm(Function):
    """torch's LayerNorm computed in a wider dtype than the input's; saves the input in its own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        normed, mean, scale = fused.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *fused.layer_norm_backward(grad, *ctx.saved_tensors), None
