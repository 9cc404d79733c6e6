"""Layers that depend on more than their input and parameters: an index, a rank, a generator, a clock, earlier calls."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.layers.attention import ParallelAttention
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import RMSNorm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.block import Block
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Placement, Shard


class LocalHeads(ParallelAttention):
    """Scales each head by its index on this rank."""

    def attend(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, context: Any) -> Tensor:
        attended_BSHK = super().attend(q_BSHK, k_BSGK, v_BSGK, context)
        return attended_BSHK * (1 + torch.arange(attended_BSHK.shape[2], dtype=q_BSHK.dtype))[:, None]


class LocalFeatures(ParallelMLP):
    """Scales each inner feature by its index on this rank."""

    def activate(self, up: Tensor) -> Tensor:
        inner = super().activate(up)
        return inner * (1 + torch.arange(inner.shape[-1], dtype=inner.dtype))


class RankConstant(ParallelMLP):
    """Multiplies by a factor that depends on the rank."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return super().forward(hidden_BSD, context) * (1 + 0.1 * self.mesh.rank)


class WrongDim(ParallelMLP):
    """Mixes inner features by a square matrix that is sharded in the wrong dim."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.ffn = ffn
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"mix": Placement((self.ffn, self.ffn), {Axis.TP: Shard(1)})}

    def activate(self, up: Tensor) -> Tensor:
        inner = super().activate(up)
        return inner @ self.mix[: inner.shape[-1]]


class Dropping(ParallelMLP):
    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return F.dropout(super().forward(hidden_BSD, context), 0.3)


class DroppingModule(ParallelMLP):
    """The same with a torch module."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.drop = nn.Dropout(0.3)

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return self.drop(super().forward(hidden_BSD, context=context))


class DroppingHeads(ParallelAttention):
    def attend(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, context: Any) -> Tensor:
        return F.dropout(super().attend(q_BSHK, k_BSGK, v_BSGK, context), 0.3)


class PythonNoise(ParallelMLP):
    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return super().forward(hidden_BSD, context) * (1 + random.random())


class NumpyNoise(ParallelMLP):
    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return super().forward(hidden_BSD, context) * (1 + np.random.rand())


class Clock(ParallelMLP):
    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return super().forward(hidden_BSD, context) * (1 + time.perf_counter() % 1)


class Counting(ParallelMLP):
    """Scales by the number of its calls."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.calls = 0

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        self.calls += 1
        return super().forward(hidden_BSD, context) * (1 + 0.1 * self.calls)


class OneRankPair(ParallelModule):
    """Its second product does not know of the other ranks, which is this layer's fault."""

    def __init__(self, hidden: int, ffn: int, mesh: Mesh, *, sequence_parallel: bool = False, **options: Any) -> None:
        super().__init__(mesh)
        self.up = ColumnParallelLinear(hidden, ffn, mesh, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(ffn, hidden, mesh, sequence_parallel=sequence_parallel)

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        self.down.mesh = Mesh.single()
        output = self.down(F.silu(self.up(hidden_BSD)))
        self.down.mesh = self.mesh
        return output


class WholeNorm(ParallelMLP):
    """A norm that was built without sequence parallelism, applied to a shard of the sequence."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.norm = RMSNorm(hidden, mesh, sequence_parallel=False)

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return super().forward(self.norm(hidden_BSD), context)


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + torch.rand_like(gradient))


class NoisyBackward(ParallelMLP):
    """Correct in the forward pass; its backward draws random numbers."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return super().forward(_Noisy.apply(hidden_BSD), context)


class LocalBlock(Block):
    """A block whose own code subtracts a mean over rows of the sequence."""

    def forward(self, hidden_BSD: Tensor, context: Any) -> Tensor:
        output = super().forward(hidden_BSD, context)
        return output - output.mean(1, keepdim=True)


class Bent(ParallelMLP):
    """Produces a tensor of a wrong shape on several ranks."""

    def activate(self, up: Tensor) -> Tensor:
        inner = super().activate(up)
        return torch.cat([inner, inner], -1) if self.mesh[Axis.TP].size > 1 else inner
