"""The parallel layout of a configuration, without processes and without torch.

A :class:`Layout` holds the mesh shape, the schedule, the slice of the model on each stage, and the memory of each rank.
Training uses the same functions, so the layout that is shown is the layout that runs. :func:`smaller_settings` proposes
changes of a layout that ran out of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from megastack.comm.shared_memory.plan import reserved_bytes
from megastack.config.convert import replace_values
from megastack.config.layout_rules import mesh_shape
from megastack.config.phases import longest
from megastack.config.rules import violations
from megastack.config.schema import TrainConfig
from megastack.mesh.groups import group_plans
from megastack.mesh.shape import MeshShape
from megastack.models.activations import activation_bytes
from megastack.models.profile import StaticBytes, rank_parameters, static_bytes, total_parameters
from megastack.models.stages import StageSlice, configured_schedule, stage_slices
from megastack.pipeline.activations import rank_peak_microbatches
from megastack.pipeline.check import check
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.simulate import Timeline, simulate

PROPOSED = 4
"""The number of proposals that a report shows."""


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

    @property
    def shared_memory_bytes(self) -> int:
        """What each rank reserves to communicate with others if it is a CPU rank; 0 on GPUs, and with gloo."""
        config = self.config
        if config.device == "cuda" or config.launch.cpu_transport == "gloo" or self.shape.world_size == 1:
            return 0
        return reserved_bytes(group_plans(self.shape, 0))

    def pipeline_ranks(self) -> list[RankShare]:
        """The share of one rank for each ``pp`` coordinate; all ranks with the same ``pp`` hold the same amount."""
        return self._shares

    @cached_property
    def _shares(self) -> list[RankShare]:
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
        peak = rank_peak_microbatches(self.schedule, pp, sum(stage.until_w for stage in each) / saved)
        return ceil(peak * saved) + max(stage.recomputed for stage in each)


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


def smaller_settings(config: TrainConfig, world_size: int) -> list[str]:
    """Return overrides that need less memory, each valid on the same number of ranks, the cheapest in time first.

    A proposal is one change of the given configuration, such as ``recompute.mode=selective``; several can be combined.
    """
    found = []
    for changes in _candidates(config, world_size):
        if not violations(replace_values(config, changes), world_size):
            found.append(" ".join(f"{key}={_plain(value)}" for key, value in changes.items()))
    return found[:PROPOSED]


def _candidates(config: TrainConfig, world_size: int) -> Iterator[Mapping[str, Any]]:
    parallel = config.parallel
    dp = parallel.dp or world_size // (parallel.pp * parallel.cp * parallel.tp)
    if not config.loss.chunked:
        yield {"loss.chunked": True}
    if config.batch.micro_size > 1:
        yield {"batch.micro_size": config.batch.micro_size // 2}
    if parallel.zero.stage == 0 and dp > 1:
        yield {"parallel.zero.stage": 1}
    if config.recompute.mode == "none":
        yield {"recompute.mode": "selective"}
    if config.recompute.mode in ("none", "selective"):
        yield {"recompute.mode": "full"}
    if parallel.zero.stage in (1, 2) and dp > 1:
        yield {"parallel.zero.stage": parallel.zero.stage + 1}
    if dp % 2 == 0:
        yield {"parallel.tp": parallel.tp * 2, "parallel.dp": dp // 2}
        yield {"parallel.pp": parallel.pp * 2, "parallel.dp": dp // 2}
    if not parallel.zero.offload:
        yield {"parallel.zero.offload": True}


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
