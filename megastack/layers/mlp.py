"""The feed-forward layer with its inner features split over the tensor-parallel axis.

``swiglu`` (Shazeer 2020) multiplies an up projection by the SiLU of a gate: one weight ``(2, F, D)``, gate first, split
on F so that each rank holds matching features of both. ``gelu`` has one projection ``(F, D)`` and GPT-2's tanh
approximation of the GELU. Nothing is communicated between the two projections. Parameters, saved tensors, FLOPs and
rules are in :mod:`megastack.layers.mlp_spec`.

Shapes: B microbatch, S sequence, D hidden, F inner features, t tensor-parallel degree.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from megastack.errors import ConfigError
from megastack.layers import fused
from megastack.layers.autocast import Function, once_differentiable
from megastack.layers.context import Context
from megastack.layers.kernels import gelu
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear
from megastack.layers.mlp_spec import GATED, MLPSpec
from megastack.layers.overrides import built_in
from megastack.mesh.mesh import Mesh
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Initialiser, Normal


class ParallelMLP(ParallelModule):
    """Two projections with a non-linearity between; communicates like one column- and one row-parallel layer.

    Subclasses change the non-linearity by overriding :meth:`activate`. The argument ``activation`` determines the shape
    of its input.

    Attributes:
        uses_cache: a subclass that overrides a method sets it to True if generation may call it with only the new
            tokens, that is, if its output for a token depends on no other token. The built-in class does not set it.

    Args:
        hidden: D.
        ffn: F, a multiple of t.
        mesh: the ranks to split over.
        activation: ``swiglu`` (gated) or ``gelu`` (tanh approximation).
        bias: biases in both projections.
        sequence_parallel: input and output are split along the sequence over tp.
        init: initial values of the up projection.
        out_init: initial values of the down projection; None means ``init``.

    Raises:
        ConfigError: the activation is unknown.
        PlacementError: t does not divide F.
    """

    uses_cache: ClassVar[bool]

    def __init__(
        self,
        hidden: int,
        ffn: int,
        mesh: Mesh,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        sequence_parallel: bool = False,
        init: Initialiser = Normal(0.02),  # noqa: B008 - frozen
        out_init: Initialiser | None = None,
    ) -> None:
        super().__init__(mesh)
        if activation not in GATED:
            raise ConfigError(f"model.activation={activation}: unknown; use {' or '.join(GATED)}, or subclass the MLP")
        self.spec = MLPSpec(hidden, ffn, activation, bias, sequence_parallel, init, out_init)
        self.gated = self.spec.gated
        self.up = ColumnParallelLinear.from_spec(self.spec.up, mesh)
        self.down = RowParallelLinear.from_spec(self.spec.down, mesh)

    @built_in
    def forward(self, hidden_BSD: Tensor, context: Context | None = None) -> Tensor:
        """Maps ``(B, S, D)``, or ``(B, S/t, D)`` under sequence parallelism, to the same shape."""
        return self.down(self.activate(self.up(hidden_BSD)))

    @built_in
    def activate(self, up: Tensor) -> Tensor:
        """Maps ``(B, S, 2, F/t)``, gate first, or ``(B, S, F/t)`` without a gate, to ``(B, S, F/t)``."""
        if not self.gated:
            return gelu(up)
        return fused.gated(up) if torch.compiler.is_compiling() else _SwiGLU.apply(up)


class _SwiGLU(Function):
    """``silu(gate) * value``; saves only gate and value and recomputes the SiLU in backward."""

    @staticmethod
    def forward(ctx: Any, up: Tensor) -> Tensor:
        ctx.save_for_backward(up)
        return fused.swiglu(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> Tensor:
        return fused.swiglu_backward(grad_BSF, *ctx.saved_tensors)
