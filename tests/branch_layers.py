"""MLPs whose data ranks use different parameters, or that have a parameter that another run did not have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megastack.layers.mlp import ParallelMLP
from megastack.mesh.shape import Axis
from megastack.placement.placement import Ones, Placement


class BranchMLP(ParallelMLP):
    """Scales its output on the first data rank, shifts it on the others; ``idle`` is used on none."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.hidden = hidden
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        own = {name: Placement((self.hidden,), init=Ones()) for name in ("gain", "shift")}
        return own | {"idle": Placement((3,))}

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        output_BSD = super().forward(hidden_BSD, context)
        return output_BSD + self.shift if self.mesh[Axis.DP].rank else output_BSD * self.gain


class GainMLP(ParallelMLP):
    """Scales its output by a gain, which another run did not have."""

    def __init__(self, hidden: int, ffn: int, mesh: Any, **options: Any) -> None:
        super().__init__(hidden, ffn, mesh, **options)
        self.hidden = hidden
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        return {"gain": Placement((self.hidden,), init=Ones())}

    def forward(self, hidden_BSD: Tensor, context: Any = None) -> Tensor:
        return super().forward(hidden_BSD, context) * self.gain
