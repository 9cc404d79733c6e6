"""Layers with parameters of few elements or of none, and a block without parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megastack.layers.mlp import ParallelMLP
from megastack.mesh.mesh import Mesh
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Ones, Placement

SHAPES = {"one": (1,), "three": (3,), "empty": (0,), "rows": (0, 8)}


class OddMLP(ParallelMLP):
    """Scales its output by small parameters and by empty ones."""

    def __init__(self, hidden: int, ffn: int, mesh: Mesh, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {name: Placement(shape, init=Ones()) for name, shape in SHAPES.items()}

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        output_BSD = super().forward(hidden_BSD, context)
        for name in SHAPES:
            output_BSD = output_BSD * (1 + getattr(self, name).sum() / 8)
        return output_BSD


class ScalarMLP(ParallelMLP):
    """Has a parameter without dims."""

    def __init__(self, hidden: int, ffn: int, mesh: Mesh, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"scale": Placement((), init=Ones())}


class PlainBlock(ParallelModule):
    """A block without parameters."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(next(x for x in (*args, *options.values()) if isinstance(x, Mesh)))

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return hidden_BSD + 0.1 * hidden_BSD.tanh()
