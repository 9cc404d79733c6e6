"""Locates the origin of a non-finite loss or gradient, after the step that had it.

The step itself checks no intermediate value. Afterwards its parameters and gradients still exist, and its data are a
function of its number, so the forward is run once more with a hook on every module's output. All ranks take part and
reach the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megastack.comm.objects import all_gather_objects
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, describe_coordinates
from megastack.pipeline.runtime import Pipeline
from megastack.training.step import TrainStep


@dataclass(frozen=True)
class NonfiniteOrigin:
    """Where the first non-finite value was found.

    Attributes:
        text: a description.
        rank: the global rank, if it could be determined.
        coordinates: its mesh coordinates, as text.
    """

    text: str
    rank: int | None = None
    coordinates: str | None = None


@dataclass(frozen=True, order=True)
class _NonfiniteOutput:
    """The first non-finite module output on a rank; a smaller one may have caused a larger one."""

    microbatch: int
    stage: int
    order: int
    rank: int
    module: str


@dataclass(frozen=True)
class _RankFindings:
    """The findings on one rank."""

    rank: int
    forward: _NonfiniteOutput | None
    microbatches: tuple[int, ...]
    weight: str | None
    gradient: str | None


def locate_nonfinite(step: TrainStep, stages: Sequence[nn.Module], number: int) -> NonfiniteOrigin:
    """Find the origin of a non-finite value in the 0-based step ``number``, which was just run and not applied.

    Must be called on every rank. The module, rank and microbatch are the first ones in the forward. If the forward is
    finite, the named parameter is the one nearest to the loss, since gradients further back are not finite either.
    """
    mesh, pipeline = step.mesh, step.pipeline
    losses = tuple(sorted(m for m, report in pipeline.reports.items() if not bool(torch.isfinite(report))))
    step.buckets.wait_parameters()
    weights = [pair for stage in stages for pair in stage.named_parameters()]
    gradients = dict(step.buckets.named_gradients())
    gradient = _first_nonfinite((name, gradients[name]) for name, _ in reversed(weights) if name in gradients)
    microbatches = step.to_device(step.loader.step(number))
    with _watching(stages, pipeline, mesh.rank) as outputs:
        pipeline.evaluate(microbatches)
    forward = outputs[0] if outputs else None
    own = _RankFindings(mesh.rank, forward, losses, _first_nonfinite(weights), gradient)
    return _conclude(all_gather_objects(own, mesh.world), mesh)


def _conclude(found: Sequence[_RankFindings], mesh: Mesh) -> NonfiniteOrigin:
    """The origin; all ranks have the same findings, so it is the same on every rank."""
    output = min((each.forward for each in found if each.forward is not None), default=None)
    weight = next((each for each in found if each.weight is not None), None)
    # The last stage comes first in the backward; within a stage the lowest rank is named.
    bad = [each for each in found if each.gradient is not None]
    gradient = min(bad, key=lambda each: (-mesh.shape.coordinates(each.rank)[Axis.PP], each.rank), default=None)
    loss = next((each for each in found if each.microbatches), None)
    parts, rank = [], None
    if output is not None:
        rank = output.rank
        parts.append(f"first in the output of {output.module}, microbatch {output.microbatch}")
    elif loss is not None:
        rank = loss.rank
        parts.append(f"in the loss of microbatch {loss.microbatches[0]}")
    if weight is not None:
        rank = weight.rank if rank is None else rank
        parts.append(f"the weight {weight.weight} is not finite")
    if gradient is not None:
        rank = gradient.rank if rank is None else rank
        parts.append(f"first gradient {gradient.gradient}")
    if rank is None:
        return NonfiniteOrigin("; the forward, run again, is finite")
    coordinates = describe_coordinates(mesh.shape.coordinates(rank))
    return NonfiniteOrigin(f", on rank {rank} ({coordinates}): {'; '.join(parts)}", rank, coordinates)


def _first_nonfinite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    return next((name for name, x in named if not bool(torch.isfinite(x).all())), None)


@contextmanager
def _watching(stages: Sequence[nn.Module], pipeline: Pipeline, rank: int) -> Iterator[list[_NonfiniteOutput]]:
    """Context manager that records the first module whose output is not finite."""
    outputs: list[_NonfiniteOutput] = []
    calls = 0

    def hook_for(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            nonlocal calls
            calls += 1
            action = pipeline.current
            if not outputs and action is not None and not _finite(output):
                outputs.append(_NonfiniteOutput(action.microbatch or 0, action.stage, calls, rank, name or "the stage"))

        return hook

    handles = [m.register_forward_hook(hook_for(name)) for stage in stages for name, m in stage.named_modules()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _finite(output: object) -> bool:
    parts = output if isinstance(output, tuple | list) else output.values() if isinstance(output, dict) else [output]
    return all(bool(torch.isfinite(x).all()) for x in parts if isinstance(x, Tensor) and x.is_floating_point())
