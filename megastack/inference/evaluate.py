"""Evaluation of a model on texts, on any parallel layout: mean nats per token, each token counted once.

The forward and the sum are the same as in a validation during training. Windows of ``sequence_length`` tokens follow
one another, so a token attends to the earlier tokens in its own window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megastack.batch import Microbatch, copy_microbatches
from megastack.comm.transfers import copy_to_device
from megastack.mesh.mesh import Mesh
from megastack.pipeline.runtime import Pipeline
from megastack.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Score:
    """The result of an evaluation.

    Attributes:
        nats: mean cross-entropy per token; NaN if there are no tokens.
        tokens: the number of predicted tokens.
    """

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the nats; infinite on overflow."""
        return math.inf if self.nats >= 700 else math.exp(self.nats)


@torch.no_grad()
def evaluate(
    stages: Sequence[nn.Module], schedule: Schedule, mesh: Mesh, batches: Iterable[Sequence[Microbatch]], tokens: int
) -> Score:
    """The score over all batches of all data-parallel ranks, identical on every rank.

    Args:
        stages: this rank's stages, in evaluation mode.
        schedule: assigns stages to ranks.
        mesh: the ranks.
        batches: the batches of this data-parallel rank; all ranks have the same number.
        tokens: the number of labels in the batches of all data-parallel ranks.
    """
    pipeline = Pipeline(stages, schedule, mesh)
    copy = partial(copy_to_device, device=mesh.device)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for batch in batches:
        total += pipeline.evaluate(copy_microbatches(batch, copy))
    return Score(float(total) / tokens if tokens else math.nan, tokens)
