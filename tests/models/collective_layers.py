"""A layer with collectives of its own."""

from __future__ import annotations

from torch import Tensor

from megastack.comm.autograd import copy_to, gather_from, gather_replicated, reduce_from, scatter_to, slice_to
from megastack.layers.context import Context
from megastack.layers.mlp import ParallelMLP
from megastack.mesh.shape import Axis


class CommunicatingMLP(ParallelMLP):
    """An MLP whose result, which is replicated or split along the sequence, is sent around and comes back."""

    def forward(self, hidden_BSD: Tensor, context: Context | None = None) -> Tensor:
        out_BSD, group = super().forward(hidden_BSD, context), self.mesh[Axis.TP]
        pieces_BSD = scatter_to(gather_from(out_BSD, group, 1), group, 1) / group.size
        whole_BSD = gather_replicated(slice_to(pieces_BSD, group, -1), group, -1)
        return reduce_from(copy_to(whole_BSD, group), group) / group.size
