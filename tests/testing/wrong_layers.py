"""Layers with one error each, for verify to find, and a correct one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megastack.comm.autograd import reduce_from, scatter_to
from megastack.layers.attention import ParallelAttention
from megastack.layers.linear import RowParallelLinear
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.shape import Axis
from megastack.placement.placement import Ones, Placement, Shard

PARTIAL = frozenset({Axis.TP})


class GainMLP(ParallelMLP):
    """Correct: a replicated gain for each output, and a sharded slope for each inner feature."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, *, sequence_parallel: bool = False, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, sequence_parallel=sequence_parallel, **options)
        self.hidden, self.ffn = hidden, ffn
        self.partial = PARTIAL if sequence_parallel else frozenset()
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {
            "slope": Placement((self.ffn,), {Axis.TP: Shard(0)}, init=Ones()),
            "gain": Placement((self.hidden,), partial=self.partial, init=Ones()),
        }

    def activate(self, up: Tensor) -> Tensor:
        return super().activate(up) * self.slope

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return super().forward(hidden_BSD, context) * self.gain


class UndeclaredGain(GainMLP):
    def placements(self) -> dict[str, Placement]:
        return super().placements() | {"gain": Placement((self.hidden,), init=Ones())}


class OverdeclaredGain(GainMLP):
    def placements(self) -> dict[str, Placement]:
        return super().placements() | {"gain": Placement((self.hidden,), partial=PARTIAL, init=Ones())}


class UndeclaredScale(ParallelAttention):
    """A replicated parameter applied to this rank's heads: partial without sequence parallelism too."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"scale": Placement((self.head_dim,), init=Ones())}

    def attend(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, context: Any) -> Tensor:
        return super().attend(q_BSHK, k_BSGK, v_BSGK, context) * self.scale


class LocalNorm(ParallelMLP):
    """Normalises over this rank's features."""

    def activate(self, up: Tensor) -> Tensor:
        inner = super().activate(up)
        return inner / inner.square().mean(-1, keepdim=True).add(1e-3).sqrt()


class EarlyRow(RowParallelLinear):
    """Adds the bias on every rank, before the sum."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        partial = F.linear(x_BSF, self.weight, self.bias)
        group = self.mesh[Axis.TP]
        return scatter_to(partial, group, 1) if self.sequence_parallel else reduce_from(partial, group)


class EarlyBias(ParallelMLP):
    def __init__(self, hidden: int, ffn: int, mesh: Any, *, sequence_parallel: bool = False, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, sequence_parallel=sequence_parallel, **options)
        self.down = EarlyRow(ffn, hidden, mesh, bias=True, sequence_parallel=sequence_parallel)


class NoReduction(ParallelMLP):
    """Returns each rank's part of the sum; without sequence parallelism the shapes are right."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return F.linear(self.activate(self.up(hidden_BSD)), self.down.weight)


class NoCopy(ParallelMLP):
    """Correct in the forward pass; the gradient of its input is each rank's part."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        up = F.linear(hidden_BSD, self.up.weight.flatten(0, -2)).unflatten(-1, self.up.weight.shape[:-1])
        return self.down(self.activate(up))


class Undeclared(ParallelMLP):
    """Has a parameter without a placement."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extra = torch.nn.Parameter(torch.ones(3))


class Rounded(GainMLP):
    """Its backward adds an error above every tolerance, to the gain only, on the last tp rank."""

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        off = 1e-6 if self.mesh[Axis.TP].rank else 0.0
        output = super().forward(hidden_BSD, context)
        return output + off * (self.gain - self.gain.detach())
