"""The two sides of a comparison on one rank: ``side.step(number)`` trains one step and returns the loss.

Both sides use the same loader, initial values, and fused AdamW with the same decay groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from bench.task import Layout, configuration
from bench.torch_side import Torch
from megastack.assemble.training import Training, build_training
from megastack.batch import Microbatch
from megastack.comm.traffic import Ledger
from megastack.config.layout_rules import mesh_shape
from megastack.data.loader import Loader
from megastack.mesh.device import keep_freed_memory
from megastack.mesh.mesh import Mesh


class Side(Protocol):
    """One side of a comparison."""

    def step(self, number: int) -> Tensor | None:
        """Train on the batch of a step; this rank's part of the mean loss before the update, None if it has none."""


class Megastack:
    """The package's own training step."""

    def __init__(self, layout: Layout) -> None:
        training = _training(layout)
        keep_freed_memory(training.mesh.device)  # as the workers of megastack do
        self.ledger: Ledger = training.mesh.ledger
        self.loader = training.step.loader
        self._step = training.step

    def step(self, number: int) -> Tensor | None:
        """Train on the batch of a step; the loss before the update."""
        return self._step(number).loss


def loader_of(layout: Layout) -> Loader:
    """The loader of a layout; everything else that building it needs is freed."""
    return _training(layout).step.loader


def _training(layout: Layout) -> Training:
    config = configuration(layout)
    return build_training(config, Mesh.from_environment(mesh_shape(config)))


def peer(layout: Layout, microbatches: Callable[[int], list[Microbatch]]) -> Side:
    """The side that megastack is compared with on a layout; ``microbatches`` returns the data of a step."""
    if layout.kind != "deepspeed":
        return Torch(layout, microbatches)
    from bench.deepspeed_side import DeepSpeed  # optional, and slow to import

    return DeepSpeed(layout, microbatches)
