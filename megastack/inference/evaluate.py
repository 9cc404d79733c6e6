"""How well a model predicts texts, on any layout: mean nats a token, each token counted once.

The forward and the sum are those of a validation during training. Windows of ``sequence_length`` tokens follow one
another, so a token sees what stands before it in its own window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megastack.batch import Microbatch
from megastack.mesh.mesh import Mesh
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Score:
    """How well texts were predicted.

    Attributes:
        nats: mean cross-entropy of a token; not a number where there are none.
        tokens: how many were predicted.
    """

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the nats; infinite where that is too large for a number."""
        return math.inf if self.nats >= 700 else math.exp(self.nats)


@torch.no_grad()
def evaluate(
    stages: Sequence[nn.Module], schedule: Schedule, mesh: Mesh, batches: Iterable[Sequence[Microbatch]], tokens: int
) -> Score:
    """The score of this rank's stages over all batches of all data-parallel ranks; the same on every rank.

    Args:
        stages: in evaluation mode.
        schedule: which rank has which stage.
        mesh: the ranks.
        batches: this data-parallel coordinate's, equally many on each.
        tokens: labels in them, over all coordinates.
    """
    pipeline = Pipeline(stages, schedule, mesh)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        total += pipeline.evaluate([microbatch.to(mesh.device) for microbatch in batch])
    return Score(float(total) / tokens if tokens else math.nan, tokens)
