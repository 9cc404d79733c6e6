"""An MLP whose forward updates buffers of every kind, and layers with one error in their buffers each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megastack.comm.collectives import all_reduce
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.shape import Axis
from megastack.placement.boxes import local_shape
from megastack.placement.placement import Ones, Placement, Shard, Zeros


class TrackingMLP(ParallelMLP):
    """Keeps a running mean of its output, and one of its inner features, sharded over tp; its output depends on both.

    ``mean``, ``count`` and ``seen`` are not declared, so every rank holds them whole. ``level`` and ``gain`` are, the
    first with initial values from here, the second without. ``scratch`` is not saved in checkpoints.
    """

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.ffn = ffn
        shape = local_shape(self.placements()["level"], mesh.shape)
        self.register_buffer("mean", torch.zeros(hidden, device="cpu"))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device="cpu"))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool, device="cpu"))
        self.register_buffer("level", torch.full(shape, 0.25, device="cpu"))
        self.register_buffer("gain", torch.zeros(shape))
        self.register_buffer("scratch", torch.zeros(3, device="cpu"), persistent=False)

    def placements(self) -> dict[str, Placement]:
        shards = {Axis.TP: Shard(0)}
        return {"level": Placement((self.ffn,), shards), "gain": Placement((self.ffn,), shards, init=Ones())}

    def activate(self, up: Tensor) -> Tensor:
        inner_BSF = super().activate(up)
        output = inner_BSF * self.gain + self.level.clone()
        if self.training:
            self._track("level", inner_BSF)
        return output

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        output_BSD = super().forward(hidden_BSD, context) - self.mean.clone()
        if self.training:
            self._track("mean", output_BSD)
            self.count += 1
            self.seen[0] = True
        return output_BSD

    @torch.no_grad()
    def _track(self, name: str, x: Tensor) -> None:
        group = self.mesh[Axis.DP]
        mean = all_reduce(x.float().mean((0, 1)), group) / group.size
        getattr(self, name).lerp_(mean.to(getattr(self, name).dtype), 0.25)


class StrayMLP(TrackingMLP):
    """Its running mean covers only the samples of this rank."""

    def _track(self, name: str, x: Tensor) -> None:
        with torch.no_grad():
            getattr(self, name).lerp_(x.float().mean((0, 1)), 0.25)


class BlankMLP(ParallelMLP):
    """Builds a buffer on the meta device without declaring its values."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.register_buffer("table", torch.zeros(hidden))


class DeclaredBlankMLP(BlankMLP):
    """The same, declared."""

    def placements(self) -> dict[str, Placement]:
        return {"table": Placement((16,), init=Zeros())}


class HiddenMLP(ParallelMLP):
    """A buffer that differs between ranks and does not affect the output."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.register_buffer("quiet", torch.zeros((), dtype=torch.int32, device="cpu"))

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        self.quiet += 1 + self.mesh[Axis.TP].rank
        return super().forward(hidden_BSD, context)
