"""Learned absolute positions: a table with one row per position, added to the token embedding.

The table is the same on every tensor-parallel rank. Under sequence parallelism each rank looks up its own slice of the
positions, so the table's gradient is partial over tp. Nothing is communicated. Rotary positions are in
:mod:`megastack.layers.rope`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megastack.layers.linear_ops import check_dims, check_sequence
from megastack.layers.overrides import built_in
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Initialiser, Normal, Placement


class LearnedPositions(ParallelModule):
    """Rows of a table by position.

    Args:
        max_positions: rows of the table; the loader keeps positions below it.
        hidden: D.
        mesh: the ranks that a sequence may be split over.
        sequence_parallel: give this rank's slice of the sequence only.
        init: initial values of the table.
    """

    weight: nn.Parameter

    def __init__(
        self,
        max_positions: int,
        hidden: int,
        mesh: Mesh,
        *,
        sequence_parallel: bool = False,
        init: Initialiser = Normal(0.02),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(mesh)
        self.shape = (max_positions, hidden)
        self.sequence_parallel = sequence_parallel
        self.init = init
        self.create_parameters()

    def placements(self) -> dict[str, Placement]:
        """The replicated table; its gradient is partial over tp under sequence parallelism."""
        partial = frozenset({Axis.TP} if self.sequence_parallel else ())
        return {"weight": Placement(self.shape, partial=partial, init=self.init)}

    @built_in
    def forward(self, positions_BS: Tensor) -> Tensor:
        """``(B, S)`` positions to ``(B, S, D)``, or to this rank's ``(B, S/t, D)`` under sequence parallelism.

        Raises:
            PlacementError: S is not a multiple of t under sequence parallelism.
        """
        group = self.mesh[Axis.TP]
        if self.sequence_parallel:
            check_dims(positions_BS, "(…, S) positions", least=1)
            check_sequence(positions_BS.shape[-1], group)
            positions_BS = torch.tensor_split(positions_BS, group.size, dim=-1)[group.rank]
        return F.embedding(positions_BS, self.weight)
