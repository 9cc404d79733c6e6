"""The ranks that communicate along one axis (or several fused ones), as one small value."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch.distributed as dist

from megastack.comm.flight_recorder import FlightRecorder, Operation
from megastack.comm.ledger import Ledger
from megastack.weight_gradients import WeightGradients


@dataclass(frozen=True)
class AxisGroup:
    """One rank's view of its peers along an axis.

    Attributes:
        rank: this rank's place among its peers, 0-based.
        size: the number of peers, this rank included.
        ranks: their global ranks, in order.
        group: torch's process group; ``None`` when ``size`` is 1, where nothing is ever communicated.
        axis: the ledger's label (``dp`` stands for fused ``dp·cp`` as well).
        ledger: where operations on this group are counted.
        weight_gradients: what layers that are split over the group do with the gradients of their weights.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    axis: str
    ledger: Ledger
    weight_gradients: WeightGradients = field(default_factory=WeightGradients, compare=False)

    @property
    def flight_recorder(self) -> FlightRecorder:
        """What this rank did last, on any group of its mesh."""
        return self.ledger.flight_recorder

    def begin(self, op: str, shape: tuple[int, ...] = ()) -> Operation:
        """Note on the trail that this rank takes part in a collective of this group."""
        return self.ledger.flight_recorder.start(self.axis, op, shape, self.ranks)

    def blocks(self, op: str) -> AbstractContextManager[None]:
        """Note a collective that blocks until it is done, which the context is about to call."""
        return self.flight_recorder.waits(self.begin(op))

    @staticmethod
    def single(axis: str, ledger: Ledger, rank: int = 0, weight_gradients: WeightGradients | None = None) -> AxisGroup:
        """A group of this rank alone."""
        return AxisGroup(0, 1, (rank,), None, axis, ledger, weight_gradients or WeightGradients())
