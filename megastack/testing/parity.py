"""``assert_parity``: your own parallel layer gives on a mesh what it gives on one rank.

A module-level factory builds the layer on a mesh. The layer is initialised by global name, its zeros and ones are moved
off by noise (a bias of zero hides a bias added once too often), and it is trained for a few steps on the same global
input. Outputs, input gradients, parameter gradients, their norm and weights must agree by the metric of
:mod:`megastack.testing.compare`, and what several ranks hold copies of must stay the same on each.

Example::

    def my_mlp(mesh: Mesh) -> ParallelMLP:
        return ParallelMLP(16, 32, mesh)

    assert_parity(my_mlp, MeshShape(dp=2, tp=2))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megastack.checkpoint.collect import items_of, model_items, stage_placements
from megastack.checkpoint.items import StateItem
from megastack.errors import MeshError, PlacementError
from megastack.gradients.buckets import GradientBuckets
from megastack.gradients.norm import grad_norm
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.optim.optimizer import OptimizerOptions, build_optimizer
from megastack.placement.boxes import Box
from megastack.placement.module import initialise_, placements_of
from megastack.placement.placement import Normal, Placement
from megastack.random import counter_normal
from megastack.testing.compare import TOLERANCES, Trace, differences
from megastack.testing.gather import gather_whole
from megastack.testing.ranks import run_ranks

SEED, RATE = 1234, 0.05


@dataclass(frozen=True)
class _Task:
    """What is trained: steps over a global batch of sequences, and how; ``hidden`` is None where the layer tells it."""

    steps: int
    dtype: torch.dtype
    optimizer: str
    sequence_parallel: bool
    batch: int
    sequence: int
    hidden: int | None


def assert_parity(
    factory: Callable[[Mesh], nn.Module],
    shape: MeshShape,
    *,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "sgd",
    sequence_parallel: bool = False,
    batch: int = 4,
    sequence: int = 8,
    hidden: int | None = None,
    timeout: float = 60,
) -> None:
    """Assert that a layer trained on ``shape`` equals the same layer on one rank.

    Args:
        factory: builds the layer on a mesh; its forward takes and gives (B, S, D). Module-level functions run on a
            standing pool of ranks.
        shape: the mesh, with ``dp`` and ``tp``; ``pp`` and ``cp`` are 1.
        steps: optimizer steps.
        dtype: fp64 is compared to 1e-10, fp32 to 1e-5.
        optimizer: ``sgd`` or ``adamw``.
        sequence_parallel: whether the layer takes and gives sequence shards (B, S/t, D).
        batch: global batch, a multiple of ``dp``.
        sequence: S, a multiple of ``tp`` under sequence parallelism.
        hidden: D; by default the last dim of the first parameter that is called ``weight``.
        timeout: seconds after which the ranks are killed.

    Raises:
        AssertionError: naming everything that differs, by how much and by which factor.
        MeshError: the shape has a pipeline or context axis, or does not divide the batch or the sequence.
    """
    _check(shape, batch, sequence if sequence_parallel else shape.tp)
    task = _Task(steps, dtype, optimizer, sequence_parallel, batch, sequence, hidden)
    alone = run_ranks(_trace, 1, factory, MeshShape(), task, timeout=timeout)[0]
    together = run_ranks(_trace, shape.world_size, factory, shape, task, timeout=timeout)[0]
    lenient = optimizer == "adamw" and dtype == torch.float32
    found = differences(alone, together, tolerance=TOLERANCES[dtype], adam_fp32=lenient)
    assert not found, f"{shape} against one rank\n" + "\n".join(map(str, found))


def _check(shape: MeshShape, batch: int, sequence: int) -> None:
    if shape.pp > 1 or shape.cp > 1:
        raise MeshError(f"{shape}: a single layer has no pipeline or context axis; use dp and tp")
    for name, size, degree in (("batch", batch, shape.dp), ("sequence", sequence, shape.tp)):
        if size % degree:
            raise MeshError(f"{name}={size}: must be a multiple of {degree}, its number of parts on {shape}")


def _trace(factory: Callable[[Mesh], nn.Module], shape: MeshShape, task: _Task) -> Trace | None:
    """The layer's training on one mesh, on its first rank; outputs and input gradients count as gradients."""
    mesh = Mesh.from_environment(shape, device="cpu")
    layer = factory(mesh)
    initialise_(layer, mesh, SEED, dtype=task.dtype)
    perturb_(layer, mesh)
    buckets = GradientBuckets([layer], mesh)
    optimizer = build_optimizer(buckets, OptimizerOptions(task.optimizer))
    placements = stage_placements([layer])
    width = task.hidden or _width(placements)
    trace = Trace(gather_whole(model_items([layer], mesh), mesh)[0])
    for step in range(task.steps):
        buckets.zero_()
        inputs, weights = (_global(name, width, step, task) for name in ("input", "weight"))
        x = _slice(inputs, mesh, task).requires_grad_()
        output = layer(x)
        buckets.arm(0)
        ((output * _slice(weights, mesh, task)).sum() / (task.batch * task.sequence)).backward()
        buckets.finish()
        assert x.grad is not None, "the output does not depend on the input"
        seen = [_item(name, part, mesh, task) for name, part in (("<output>", output), ("<input gradient>", x.grad))]
        items = [*items_of("gradient", buckets.named_gradients(), placements, mesh), *seen]
        trace.add_gradients(*gather_whole(items, mesh))
        trace.norms.append(float(grad_norm(buckets, mesh)))
        optimizer.step(RATE)
        trace.rates.append(RATE)
        trace.add_weights(*gather_whole(model_items([layer], mesh), mesh))
        if mesh.rank == 0:
            trace.losses.append(float((trace.gradients[-1]["<output>"] * weights).sum()))
    return trace if mesh.rank == 0 else None


def _width(placements: Mapping[str, Placement]) -> int:
    weights = [placement for name, placement in placements.items() if name.split(".")[-1] == "weight"]
    if not weights:
        raise PlacementError("the layer has no parameter called weight that tells the width of its input; pass hidden")
    return weights[0].shape[-1]


def perturb_(module: nn.Module, mesh: Mesh, *, seed: int = SEED, std: float = 0.1) -> None:
    """Add counter noise to every parameter that starts at one value, the same on every layout."""
    perturb_items_(model_items([module], mesh), placements_of(module), seed=seed, std=std)


@torch.no_grad()
def perturb_items_(
    items: Sequence[StateItem], placements: Mapping[str, Placement], *, seed: int = SEED, std: float = 0.1
) -> None:
    """:func:`perturb_` on weights as checkpoint items, whoever holds which boxes of them (a shard under ZeRO 2 and 3)."""
    for item in items:
        name = item.name.partition("/")[2]
        init = placements[name].init
        if not isinstance(init, Normal) or init.std == 0:
            for box, part in item.boxes:
                noise = counter_normal(seed, f"{name}/noise", item.shape, box, std=std, dtype=part.dtype)
                part += noise.to(part.device)


def _global(name: str, width: int, step: int, task: _Task) -> Tensor:
    shape = (task.batch, task.sequence, width)
    box = Box((0, 0, 0), shape)
    return counter_normal(SEED, f"{name}/{step}", shape, box, std=1.0, dtype=task.dtype)


def _slice(x: Tensor, mesh: Mesh, task: _Task) -> Tensor:
    """This rank's part of a global (B, S, D) tensor."""
    return x[_box(x.shape[-1], mesh, task).slices].clone()


def _box(width: int, mesh: Mesh, task: _Task) -> Box:
    rows = task.batch // mesh.shape.dp
    columns = task.sequence // mesh.shape.tp if task.sequence_parallel else task.sequence
    first = mesh.coordinates[Axis.TP] * columns if task.sequence_parallel else 0
    return Box((mesh.coordinates[Axis.DP] * rows, first, 0), (rows, columns, width))


def _item(name: str, part: Tensor, mesh: Mesh, task: _Task) -> StateItem:
    """A part of a global (B, S, D) tensor as an item, so that it is gathered like a parameter."""
    width = part.shape[-1]
    return StateItem(f"seen/{name}", (task.batch, task.sequence, width), ((_box(width, mesh, task), part.detach()),))
