"""``assert_parity``: your own parallel layer gives on a mesh what it gives on one rank.

A factory builds the layer on a mesh. The layer is initialised by global name, its zeros and ones are moved off by noise
(a bias of zero hides a bias added once too often), and it is trained for a few steps on the same global input. Outputs,
input gradients, parameter gradients, their norm and weights must agree by the metric of
:mod:`megastack.testing.compare`, and what several ranks hold copies of must stay the same on each. Where they do not,
the class at fault and the cause are named as ``megastack verify`` names them.

Example::

    def my_mlp(mesh: Mesh) -> ParallelMLP:
        return ParallelMLP(16, 32, mesh)

    assert_parity(my_mlp, MeshShape(dp=2, tp=2))
"""

from __future__ import annotations

import torch

from megastack.errors import MeshError
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import MeshShape
from megastack.testing.compare import TOLERANCES, Trace, differences
from megastack.testing.explain import finding_text
from megastack.testing.layer_training import Factory, LayerTraining, Task, trace_layer
from megastack.testing.parity_cause import find_cause
from megastack.testing.perturb import perturb_ as perturb_
from megastack.testing.probes import seed_generators
from megastack.testing.ranks import run_ranks


def assert_parity(
    factory: Factory,
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
        factory: builds the layer on a mesh; its forward takes and gives (B, S, D). Any callable: new ranks are forked
            and inherit it, so a lambda, a closure or a local class will do.
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
        AssertionError: naming everything that differs, by how much and by which factor, and the class at fault.
        MeshError: the shape has a pipeline or context axis, or does not divide the batch or the sequence.
        RankFailure: the layer does not run.
    """
    _check(shape, batch, sequence if sequence_parallel else shape.tp)
    task = Task(steps, dtype, optimizer, sequence_parallel, batch, sequence, hidden)
    alone = run_ranks(lambda: _trace(factory, MeshShape(), task), 1, timeout=timeout)[0]
    together = run_ranks(lambda: _trace(factory, shape, task), shape.world_size, timeout=timeout)[0]
    lenient = optimizer == "adamw" and dtype == torch.float32
    found = differences(alone, together, tolerance=TOLERANCES[dtype], adam_fp32=lenient)
    if found:
        lines = [f"{shape} against one rank", *map(str, found)]
        finding = find_cause(factory, shape, task, timeout=timeout)
        raise AssertionError("\n".join([*lines, *([finding_text(finding)] if finding else [])]))


def _check(shape: MeshShape, batch: int, sequence: int) -> None:
    if shape.pp > 1 or shape.cp > 1:
        raise MeshError(f"{shape}: a single layer has no pipeline or context axis; use dp and tp")
    for name, size, degree in (("batch", batch, shape.dp), ("sequence", sequence, shape.tp)):
        if size % degree:
            raise MeshError(f"{name}={size}: must be a multiple of {degree}, its number of parts on {shape}")


def _trace(factory: Factory, shape: MeshShape, task: Task) -> Trace | None:
    """The layer's training on one mesh, on its first rank."""
    mesh = Mesh.from_environment(shape, device="cpu")
    training = LayerTraining(factory, mesh, task)
    seed_generators(0 if shape.world_size == 1 else 1 + mesh.rank)
    return trace_layer(training)
