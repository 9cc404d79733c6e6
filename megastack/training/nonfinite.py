"""Where a loss or gradient that is not finite came from, found after the step that had it.

The step itself looks at nothing. Afterwards its parameters and gradients are still there, and the step is a function
of its number: its forward is run once more, with a look at every module's output. All ranks take part and come to the
same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megastack.comm.objects import all_gather_objects
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, describe_coordinates
from megastack.pipeline.runtime import Pipeline
from megastack.training.step import TrainStep


@dataclass(frozen=True)
class Origin:
    """Where it began.

    Attributes:
        text: in words.
        rank: the global rank, where one could be found.
        coordinates: its place on the mesh, in words.
    """

    text: str
    rank: int | None = None
    coordinates: str | None = None


@dataclass(frozen=True, order=True)
class _Sight:
    """The first value that was not finite on a rank, ordered by what can have caused what."""

    microbatch: int
    stage: int
    order: int
    rank: int
    module: str


@dataclass(frozen=True)
class _Found:
    """What one rank saw."""

    rank: int
    forward: _Sight | None
    microbatches: tuple[int, ...]
    weight: str | None
    gradient: str | None


def locate(step: TrainStep, stages: Sequence[nn.Module], number: int) -> Origin:
    """Find the origin of what was not finite in the 0-based step ``number``, just done and not applied.

    All ranks call. The module, rank and microbatch are the first of the forward. Where the forward is finite, the
    parameter named is the one nearest to the loss: gradients further back are not finite either.
    """
    mesh, pipeline = step.mesh, step.pipeline
    reports = tuple(sorted(m for m, report in pipeline.reports.items() if not bool(torch.isfinite(report))))
    step.buckets.wait_parameters()
    weights = [pair for stage in stages for pair in stage.named_parameters()]
    gradients = dict(step.buckets.named_gradients())
    gradient = _first_bad((name, gradients[name]) for name, _ in reversed(weights) if name in gradients)
    microbatches = [microbatch.to(mesh.device) for microbatch in step.loader.step(number)]
    with _watching(stages, pipeline, mesh.rank) as sights:
        pipeline.evaluate(microbatches)
    own = _Found(mesh.rank, sights[0] if sights else None, reports, _first_bad(weights), gradient)
    return _conclude(all_gather_objects(own, mesh.world), mesh)


def _conclude(found: Sequence[_Found], mesh: Mesh) -> Origin:
    """The same from the same sights, on every rank."""
    sight = min((each.forward for each in found if each.forward is not None), default=None)
    weight = next((each for each in found if each.weight is not None), None)
    # The last stage comes first in the backward; of the ranks of a stage the lowest speaks.
    bad = [each for each in found if each.gradient is not None]
    gradient = min(bad, key=lambda each: (-mesh.shape.coordinates(each.rank)[Axis.PP], each.rank), default=None)
    lost = next((each for each in found if each.microbatches), None)
    parts, rank = [], None
    if sight is not None:
        rank = sight.rank
        parts.append(f"first in the output of {sight.module}, microbatch {sight.microbatch}")
    elif lost is not None:
        rank = lost.rank
        parts.append(f"in the loss of microbatch {lost.microbatches[0]}")
    if weight is not None:
        rank = weight.rank if rank is None else rank
        parts.append(f"the weight {weight.weight} is not finite")
    if gradient is not None:
        rank = gradient.rank if rank is None else rank
        parts.append(f"first gradient {gradient.gradient}")
    if rank is None:
        return Origin("; the forward, run again, is finite")
    coordinates = describe_coordinates(mesh.shape.coordinates(rank))
    return Origin(f", on rank {rank} ({coordinates}): {'; '.join(parts)}", rank, coordinates)


def _first_bad(named: Any) -> str | None:
    return next((name for name, x in named if not bool(torch.isfinite(x).all())), None)


@contextmanager
def _watching(stages: Sequence[nn.Module], pipeline: Pipeline, rank: int) -> Iterator[list[_Sight]]:
    """While modules run, note the first whose output is not finite."""
    sights: list[_Sight] = []
    calls = 0

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, given: Any, output: Any) -> None:
            nonlocal calls
            calls += 1
            action = pipeline.current
            if not sights and action is not None and not _finite(output):
                sights.append(_Sight(action.microbatch or 0, action.stage, calls, rank, name or "the stage"))

        return hook

    handles = [m.register_forward_hook(look(name)) for stage in stages for name, m in stage.named_modules()]
    try:
        yield sights
    finally:
        for handle in handles:
            handle.remove()


def _finite(output: Any) -> bool:
    parts = output if isinstance(output, tuple | list) else output.values() if isinstance(output, dict) else [output]
    return all(bool(torch.isfinite(x).all()) for x in parts if isinstance(x, Tensor) and x.is_floating_point())
