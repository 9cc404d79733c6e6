"""The parallel layout of a configuration, without processes and without torch.

A :class:`Layout` holds the mesh shape, the schedule, the slice of the model on each stage, and the memory of each rank.
Training uses the same functions, so the layout that is shown is the layout that runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from megastack.config.layout_rules import mesh_shape
from megastack.config.phases import longest
from megastack.config.schema import TrainConfig
from megastack.mesh.shape import MeshShape
from megastack.models.activations import activation_bytes
from megastack.models.profile import StaticBytes, rank_parameters, static_bytes, total_parameters
from megastack.models.stages import StageSlice, configured_schedule, stage_slices
from megastack.pipeline.activations import peak_microbatches
from megastack.pipeline.check import check
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import Timeline, simulate


@dataclass(frozen=True)
class Layout:
    """A configuration laid out over ranks.

    Args:
        config: a valid configuration.
        world_size: ranks started by a launcher, if any.
    """

    config: TrainConfig
    world_size: int | None = None

    @cached_property
    def shape(self) -> MeshShape:
        """The degrees."""
        return mesh_shape(self.config, self.world_size)

    @cached_property
    def schedule(self) -> Schedule:
        """The checked pipeline schedule."""
        schedule = configured_schedule(self.config, self.shape)
        check(schedule)
        return schedule

    @cached_property
    def timeline(self) -> Timeline:
        """Its simulation with a backward twice as long as a forward."""
        return simulate(self.schedule)

    @cached_property
    def slices(self) -> list[StageSlice]:
        """The slice of the model on each stage."""
        return stage_slices(self.config, self.schedule.stages)

    @property
    def microbatches(self) -> int:
        """M, the microbatches of a step on each data-parallel coordinate."""
        return self.schedule.microbatches

    @property
    def parameters(self) -> int:
        """Parameters of the model, each once, without padding."""
        return total_parameters(self.config)

    def pipeline_ranks(self) -> list[RankShare]:
        """The share of one rank for each ``pp`` coordinate; all ranks with the same ``pp`` hold the same amount."""
        return [self._share(pp) for pp in range(self.shape.pp)]

    def _share(self, pp: int) -> RankShare:
        own = [self.slices[stage] for stage in self.schedule.rank_stages(pp)]
        counts = [rank_parameters(self.config, s.layers, embedding=s.embedding, head=s.head) for s in own]
        held = [static_bytes(self.config, s.layers, embedding=s.embedding, head=s.head) for s in own]
        total = StaticBytes(
            sum(b.parameters for b in held), sum(b.gradients for b in held), sum(b.optimizer for b in held)
        )
        peak = self.timeline.peaks[pp]
        return RankShare(pp, tuple(own), sum(counts), total, peak, self._activations(own, pp))

    def _activations(self, own: list[StageSlice], pp: int) -> int:
        """Peak bytes of the microbatches alive and of one recomputed block, for the longest sequences."""
        config = longest(self.config)
        each = [activation_bytes(config, s.layers, embedding=s.embedding, head=s.head) for s in own]
        saved = sum(stage.saved for stage in each)
        if not saved:  # no layers on this rank
            return 0
        peaks = peak_microbatches(self.schedule, sum(stage.until_w for stage in each) / saved)
        return ceil(peaks[pp] * saved) + max(stage.recomputed for stage in each)


@dataclass(frozen=True)
class RankShare:
    """The share of the model and the memory of a rank with one ``pp`` coordinate.

    Attributes:
        pp: the ``pp`` coordinate.
        slices: its stages.
        parameters: allocated elements, padding and copies included.
        bytes: weights, gradients and optimizer state.
        peak_activations: the most microbatches of a whole rank whose activations are alive at once.
        activation_bytes: bytes that these microbatches save for backward, plus one recomputed block, if any.
    """

    pp: int
    slices: tuple[StageSlice, ...]
    parameters: int
    bytes: StaticBytes
    peak_activations: float
    activation_bytes: int
