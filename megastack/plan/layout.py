"""What a configuration means on its grid of ranks, worked out without processes and without torch.

One value holds the shape, the schedule, the slice of the model on each stage, and what that makes a rank hold. The
launcher's build uses the same functions, so what is shown is what runs.
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
        config: a legal configuration.
        world_size: what a launcher fixed, if any.
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
        """The part of the model on each stage."""
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
        """What a rank holds at each place along the pipeline; tp, dp and cp neighbours hold as much."""
        return [self._share(place) for place in range(self.shape.pp)]

    def _share(self, place: int) -> RankShare:
        own = [self.slices[stage] for stage in self.schedule.rank_stages(place)]
        counts = [rank_parameters(self.config, s.layers, embedding=s.embedding, head=s.head) for s in own]
        held = [static_bytes(self.config, s.layers, embedding=s.embedding, head=s.head) for s in own]
        total = StaticBytes(
            sum(b.parameters for b in held), sum(b.gradients for b in held), sum(b.optimizer for b in held)
        )
        peak = self.timeline.peaks[place]
        return RankShare(place, tuple(own), sum(counts), total, peak, self._activations(own, place))

    def _activations(self, own: list[StageSlice], place: int) -> int:
        """The most that microbatches keep at once, and one block that is recomputed; of the longest sequences."""
        config = longest(self.config)
        each = [activation_bytes(config, s.layers, embedding=s.embedding, head=s.head) for s in own]
        saved = sum(stage.saved for stage in each)
        if not saved:  # no layers at this place
            return 0
        peaks = peak_microbatches(self.schedule, sum(stage.until_w for stage in each) / saved)
        return ceil(peaks[place] * saved) + max(stage.recomputed for stage in each)


@dataclass(frozen=True)
class RankShare:
    """What one place along the pipeline holds on each of its ranks.

    Attributes:
        place: the ``pp`` coordinate.
        slices: its stages.
        parameters: allocated elements, padding and copies included.
        bytes: weights, gradients and optimizer state.
        peak_activations: the most microbatches of a whole rank whose activations are alive at once.
        activation_bytes: what these keep for backward, and the block that is recomputed, if any.
    """

    place: int
    slices: tuple[StageSlice, ...]
    parameters: int
    bytes: StaticBytes
    peak_activations: float
    activation_bytes: int
