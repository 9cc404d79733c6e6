"""What the peers of a rank would send to its host, derived from the configuration.

A rank exchanges few values with its peers: which parameters each pipeline coordinate holds, when gradients are built,
and the tensor specs of a stage's outputs, before their first message. Both follow from the stages of the other
coordinates, which are built here on the device without data and run forward once for each shape of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from megastack.assemble.inference import inference_stages
from megastack.assemble.stages import build_stage
from megastack.batch import Microbatch
from megastack.comm.group import AxisGroup
from megastack.config.schema import TrainConfig
from megastack.dryrun.device import DryRunError
from megastack.gradients.parameter_groups import freeze
from megastack.gradients.reduction import TrainedParameter, trained_parameters
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.models.decoder import Decoder
from megastack.models.stages import stage_slices
from megastack.pipeline.runtime import MicrobatchShape
from megastack.pipeline.schedule import Schedule
from megastack.pipeline.stage import TensorSpec
from megastack.placement.module import placements_of

T = TypeVar("T")


class DerivedPeers:
    """Answers for the other ranks of a mesh; see :class:`megastack.comm.peers.Peers`.

    Args:
        config: the configuration.
        mesh: the mesh of the rank that runs.
        schedule: assigns stages to pipeline coordinates.
        aside: opens a context in which nothing is counted.

    Attributes:
        generates: whether headers describe outputs of generation instead of training and validation.
    """

    def __init__(
        self, config: TrainConfig, mesh: Mesh, schedule: Schedule, aside: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.generates = False
        self._config, self._mesh, self._schedule, self._aside = config, mesh, schedule, aside
        self._slices = stage_slices(config, schedule.stages)
        self._stage = cache(self._build)
        self._specs: dict[tuple[bool, int, MicrobatchShape], list[TensorSpec]] = {}

    def gathered(self, value: T, group: AxisGroup) -> list[T]:
        """The values of all ranks of a group.

        A known function of the stages of a pipeline coordinate is computed for each; a flag is the same on all ranks.

        Raises:
            DryRunError: the value is neither.
        """
        if value is None or isinstance(value, bool | str):
            return [value] * group.size
        places = [self._mesh.shape.coordinates(rank)[Axis.PP] for rank in group.ranks]
        here = self._mesh.coordinates[Axis.PP]
        for function in (self._parameter_names, self._trained_parameters):
            known: Any = function
            if known(here) == value:
                return [known(place) for place in places]
        raise DryRunError(f"all_gather_objects over {group.axis}: a dry run cannot derive the values of other ranks")

    def header(self, about: Any) -> list[dict[str, Any]]:
        """The specs of the outputs of a stage for a shape of microbatches; ``about`` is both."""
        stage, shape = about
        return [asdict(spec) for spec in self._outputs(stage, shape)]

    def _build(self, stage: int) -> Decoder:
        with self._aside():
            return build_stage(self._config, self._mesh, self._slices[stage])

    def _stages_of(self, place: int) -> list[Decoder]:
        return [self._stage(stage) for stage in self._schedule.rank_stages(place)]

    def _parameter_names(self, place: int) -> list[str]:
        return [name for stage in self._stages_of(place) for name, _ in stage.named_parameters()]

    def _freeze(self, stages: list[Decoder]) -> None:
        every = {name for place in range(self._mesh.shape.pp) for name in self._parameter_names(place)}
        freeze(stages, self._config.optim.freeze, names=every)

    def _trained_parameters(self, place: int) -> list[TrainedParameter]:
        stages, zero = self._stages_of(place), self._config.parallel.zero
        self._freeze(stages)
        placements = {name: each for stage in stages for name, each in placements_of(stage).items()}
        named = [(name, x, placements[name]) for stage in stages for name, x in stage.named_parameters()]
        return trained_parameters(named, self._mesh, zero=zero.stage, shard_size=zero.shard_size)

    def _outputs(self, stage: int, shape: MicrobatchShape) -> list[TensorSpec]:
        key = (self.generates, stage, shape)
        if key not in self._specs:
            inputs = {spec.name: self._tensor(spec) for spec in (self._outputs(stage - 1, shape) if stage else ())}
            with self._aside(), torch.set_grad_enabled(shape[2]):
                outputs = self._forward(self._stage(stage), inputs, self._microbatch(shape))
            self._specs[key] = [TensorSpec.of(name, x) for name, x in outputs.items()]
        return self._specs[key]

    def _forward(self, stage: Decoder, inputs: dict[str, Tensor | None], microbatch: Microbatch) -> dict[str, Any]:
        if not self.generates:
            self._freeze([stage])
            outputs: Any = stage(inputs, microbatch)
        else:
            (copy,) = inference_stages(self._config, [stage])
            outputs = copy.infer(inputs, microbatch, at_B=microbatch.samples_B)
        assert isinstance(outputs, dict), "the last stage sends nothing"
        return outputs

    def _tensor(self, spec: TensorSpec) -> Tensor | None:
        if spec.shape is None:
            return None
        return torch.empty(spec.shape, dtype=spec.torch_dtype, device=self._mesh.device, requires_grad=spec.needs_grad)

    def _microbatch(self, shape: MicrobatchShape) -> Microbatch:
        sizes, documents, _ = shape
        zeros_BS = torch.zeros(sizes, dtype=torch.int64)
        microbatch = Microbatch(
            zeros_BS,
            zeros_BS,
            torch.arange(sizes[1]).expand(sizes),
            zeros_BS if documents else None,
            torch.zeros(sizes[0], dtype=torch.int64),
        )
        return microbatch.to(self._mesh.device)
