"""``assert_parity``: your own parallel layer gives on a mesh what it gives on one rank.

A module-level factory builds the layer on a mesh. The layer is initialised by global name, its zeros and ones are moved
off by noise (a bias of zero hides a bias added once too often), and it is trained for a few steps on the same global
input. Outputs, input gradients, parameter gradients and weights must agree by the metric of
:mod:`megastack.testing.compare`.

Example::

    def my_mlp(mesh: Mesh) -> ParallelMLP:
        return ParallelMLP(16, 32, mesh)

    assert_parity(my_mlp, MeshShape(dp=2, tp=2))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megastack.checkpoint.collect import items_of, model_items, stage_placements
from megastack.checkpoint.dump import gather_items
from megastack.comm.collectives import all_gather
from megastack.comm.group import AxisGroup
from megastack.errors import MeshError
from megastack.gradients.buckets import GradientBuckets
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.optim.optimizer import OptimizerOptions, build_optimizer
from megastack.placement.boxes import Box
from megastack.placement.module import initialise_, placements_of
from megastack.placement.placement import Normal
from megastack.random import counter_normal
from megastack.testing.compare import TOLERANCES, Trace, differences
from megastack.testing.ranks import run_ranks

SEED, RATE = 1234, 0.05


@dataclass(frozen=True)
class Task:
    """The global input of a parity run: B sequences per data-parallel rank of the reference, S long."""

    steps: int
    dtype: torch.dtype
    optimizer: str
    sequence_parallel: bool
    batch: int
    sequence: int


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
    timeout: float = 60,
) -> None:
    """Assert that a layer trained on ``shape`` equals the same layer on one rank.

    Args:
        factory: builds the layer on a mesh; its forward takes and gives (B, S, D), D being the last dim of the first
            parameter it declares. Module-level functions run on a standing pool of ranks.
        shape: the mesh, with ``dp`` and ``tp``; ``pp`` and ``cp`` are 1.
        steps: optimizer steps.
        dtype: fp64 is compared to 1e-10, fp32 to 1e-5.
        optimizer: ``sgd`` or ``adamw``.
        sequence_parallel: whether the layer takes and gives sequence shards (B, S/t, D).
        batch: global batch, a multiple of ``dp``.
        sequence: S, a multiple of ``tp`` under sequence parallelism.
        timeout: seconds after which the ranks are killed.

    Raises:
        AssertionError: naming everything that differs, by how much and by which factor.
        MeshError: the shape has a pipeline or context axis.
    """
    if shape.pp > 1 or shape.cp > 1:
        raise MeshError(f"{shape}: a single layer has no pipeline or context axis; use dp and tp")
    task = Task(steps, dtype, optimizer, sequence_parallel, batch, sequence)
    alone = run_ranks(_trace, 1, factory, MeshShape(), task, timeout=timeout)[0]
    together = run_ranks(_trace, shape.world_size, factory, shape, task, timeout=timeout)
    lenient = optimizer == "adamw" and dtype == torch.float32
    for rank, trace in enumerate(together):
        found = differences(alone, trace, tolerance=TOLERANCES[dtype], adam_fp32=lenient)
        assert not found, f"rank {rank} of {shape}\n" + "\n".join(map(str, found))


def _trace(factory: Callable[[Mesh], nn.Module], shape: MeshShape, task: Task) -> Trace:
    """The layer's training on one mesh; its outputs and input gradients count as gradients."""
    mesh = Mesh.from_environment(shape)
    layer = factory(mesh)
    initialise_(layer, mesh, SEED, dtype=task.dtype)
    perturb_(layer, mesh)
    buckets = GradientBuckets([layer], mesh)
    optimizer = build_optimizer(buckets, OptimizerOptions(task.optimizer))
    width = next(iter(placements_of(layer).values())).shape[-1]
    trace = Trace()
    for step in range(task.steps):
        buckets.zero_()
        x, weight = (_slice(_global(name, width, step, task), mesh, task) for name in ("input", "weight"))
        x.requires_grad_()
        output = layer(x)
        loss = (output * weight).sum() / (task.batch * task.sequence)
        buckets.arm(0)
        loss.backward()
        buckets.finish()
        assert x.grad is not None
        named = gather_items(items_of("", buckets.named_gradients(), stage_placements([layer]), mesh), mesh)
        seen = {"<output>": _whole(output.detach(), mesh, task), "<input gradient>": _whole(x.grad, mesh, task)}
        trace.gradients.append(named | seen)
        trace.losses.append(float((seen["<output>"] * _global("weight", width, step, task)).sum()))
        trace.norms.append(0.0)
        optimizer.step(RATE)
        trace.rates.append(RATE)
        trace.weights.append(gather_items(model_items([layer], mesh), mesh))
    return trace


@torch.no_grad()
def perturb_(module: nn.Module, mesh: Mesh, *, seed: int = SEED, std: float = 0.1) -> None:
    """Add counter noise to every parameter that starts at one value, the same on every layout."""
    parameters = dict(module.named_parameters())
    for name, placement in placements_of(module).items():
        if not isinstance(placement.init, Normal):
            item = items_of("", [(name, parameters[name])], {name: placement}, mesh)[0]
            box, part = item.boxes[0]
            part += counter_normal(seed, f"{name}/noise", placement.shape, box, std=std, dtype=part.dtype)


def _global(name: str, width: int, step: int, task: Task) -> Tensor:
    shape = (task.batch, task.sequence, width)
    box = Box((0, 0, 0), shape)
    return counter_normal(SEED, f"{name}/{step}", shape, box, std=1.0, dtype=task.dtype)


def _slice(x: Tensor, mesh: Mesh, task: Task) -> Tensor:
    x = x.chunk(mesh[Axis.DP].size, 0)[mesh[Axis.DP].rank]
    if task.sequence_parallel:
        x = x.chunk(mesh[Axis.TP].size, 1)[mesh[Axis.TP].rank]
    return x.clone()


def _whole(x: Tensor, mesh: Mesh, task: Task) -> Tensor:
    cuts: Sequence[tuple[AxisGroup, int]] = [(mesh[Axis.DP], 0)]
    if task.sequence_parallel:
        cuts = [(mesh[Axis.TP], 1), *cuts]
    for group, dim in cuts:
        x = all_gather(x, group, dim)
    return x
