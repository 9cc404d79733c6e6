"""Layers for assert_parity: correct ones, and one for each error that only a parity test reveals."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megastack.comm.autograd import reduce_from
from megastack.layers.attention import ParallelAttention
from megastack.layers.linear import ColumnParallelLinear, RowParallelLinear
from megastack.layers.mlp import ParallelMLP
from megastack.layers.norm import LayerNorm, RMSNorm
from megastack.layers.rope import Rope
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement

D, F = 12, 16


class Pair(ParallelModule):
    """A column- and a row-parallel layer with biases, and a square in between."""

    def __init__(self, mesh: Mesh, *, sequence_parallel: bool = False) -> None:
        super().__init__(mesh)
        self.up = ColumnParallelLinear(D, F, mesh, bias=True, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear(F, D, mesh, bias=True, sequence_parallel=sequence_parallel)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(self.up(x_BSD).square())


class Normed(ParallelModule):
    """A norm in front of a pair, so that its gradient passes a reduction."""

    def __init__(self, mesh: Mesh, norm: type[RMSNorm], *, sequence_parallel: bool, declared: bool = True) -> None:
        super().__init__(mesh)
        self.norm = norm(D, mesh, sequence_parallel=sequence_parallel and declared)
        self.pair = Pair(mesh, sequence_parallel=sequence_parallel)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.pair(self.norm(x_BSD))


class Sloped(ParallelMLP):
    """A replicated parameter on sharded features: its gradient is partial, declared or not."""

    slope: nn.Parameter

    def __init__(self, mesh: Mesh, *, declared: bool) -> None:
        super().__init__(D, F, mesh)
        self.partial = frozenset({Axis.TP} if declared else ())
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"slope": Placement((1,), partial=self.partial, init=Ones())}

    def activate(self, up: Tensor) -> Tensor:
        return super().activate(up) * self.slope


class EarlyBias(RowParallelLinear):
    """Adds its whole bias on every rank before the sum."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        assert self.bias is not None
        return reduce_from(x_BSF @ self.weight.T + self.bias, self.mesh[Axis.TP])


class Dropping(Pair):
    """Drops features of the output with a generator seeded by rank: replicas differ."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        output = super().forward(x_BSD)
        draw = torch.Generator().manual_seed(self.mesh.rank)
        return output * (torch.rand(output.shape[-1], generator=draw) < 0.5)


class OneSeed(ParallelMLP):
    """Drops inner features with the same generator on every rank: all shards drop the same."""

    def activate(self, up: Tensor) -> Tensor:
        inner = super().activate(up)
        draw = torch.Generator().manual_seed(0)
        return inner * (torch.rand(inner.shape[-1], generator=draw) < 0.5)


class Drifting(Pair):
    """Changes a replicated parameter by a rounding error that differs between ranks."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        assert self.down.bias is not None
        with torch.no_grad():
            self.down.bias += 1e-14 * self.mesh.rank
        return super().forward(x_BSD)


def mlp(mesh: Mesh, sequence_parallel: bool = False) -> nn.Module:
    return ParallelMLP(D, F, mesh, bias=True, sequence_parallel=sequence_parallel)


def gelu(mesh: Mesh) -> nn.Module:
    return ParallelMLP(D, F, mesh, activation="gelu")


def attention(mesh: Mesh, sequence_parallel: bool = False) -> nn.Module:
    more = {"kv_groups": 1, "head_dim": 4, "rope": Rope(4), "qk_norm": True, "bias": True}
    return ParallelAttention(D, 4, mesh, sequence_parallel=sequence_parallel, **more)


def early_bias(mesh: Mesh) -> nn.Module:
    pair = Pair(mesh)
    pair.down = EarlyBias(F, D, mesh, bias=True)
    return pair


RIGHT = {
    "mlp": mlp,
    "gelu": gelu,
    "attention": attention,
    "pair": Pair,
    "rms": partial(Normed, norm=RMSNorm, sequence_parallel=False),
    "sloped": partial(Sloped, declared=True),
}
SPLIT = {
    "mlp": partial(mlp, sequence_parallel=True),
    "attention": partial(attention, sequence_parallel=True),
    "pair": partial(Pair, sequence_parallel=True),
    "rms": partial(Normed, norm=RMSNorm, sequence_parallel=True),
    "layer": partial(Normed, norm=LayerNorm, sequence_parallel=True),
    "norm_alone": partial(RMSNorm, D, sequence_parallel=True),
}


def right(mesh: Mesh, name: str) -> nn.Module:
    return RIGHT[name](mesh)


def split(mesh: Mesh, name: str) -> nn.Module:
    return SPLIT[name](mesh)
