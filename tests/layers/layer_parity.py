"""What the layer tests share: the whole layer beside a split one, in fp64, and the comparison of their gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megastack.comm.collectives import all_reduce
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis
from megastack.placement.boxes import local_box
from megastack.placement.module import ParallelModule, placements_of
from megastack.placement.placement import Placement


def randn(*shape: int, seed: int = 0) -> Tensor:
    """The same fp64 numbers on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomised(whole: nn.Module) -> nn.Module:
    """A one-rank layer with random fp64 parameters, padding apart."""
    whole.double()
    placements = placements_of(whole)
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(whole.named_parameters(), start=100):
            logical = placements[name].shape
            parameter[tuple(slice(size) for size in logical)] = randn(*logical, seed=seed)
    return whole


def split_like(layer: ParallelModule, whole: nn.Module) -> ParallelModule:
    """The split layer with its parts of the whole layer's parameters."""
    layer.double()
    theirs = dict(whole.named_parameters())
    with torch.no_grad():
        for name, placement in placements_of(layer).items():
            logical, here = _parts(layer.get_parameter(name), placement, layer.mesh)
            logical.copy_(theirs[name][here])
    return layer


def assert_same_gradients(layer: ParallelModule, whole: nn.Module, atol: float = 1e-10) -> None:
    """Each parameter's gradient, summed where the placement declares it partial, is this rank's part of the whole."""
    theirs = dict(whole.named_parameters())
    for name, placement in placements_of(layer).items():
        gradient = _reduced(layer.get_parameter(name).grad, placement, layer.mesh)
        logical, here = _parts(gradient, placement, layer.mesh)
        torch.testing.assert_close(
            logical, theirs[name].grad[here], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
        padding = gradient.clone()
        padding[tuple(slice(size) for size in logical.shape)] = 0
        assert not padding.any(), f"{name}: padding has a gradient"


def assert_close(actual: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def piece(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """This rank's part of a global tensor, a leaf that requires a gradient."""
    group = mesh[Axis.TP]
    return x.detach().chunk(group.size, dim)[group.rank].clone().requires_grad_()


def _parts(local: Tensor, placement: Placement, mesh: Mesh) -> tuple[Tensor, tuple[slice, ...]]:
    box = local_box(placement, mesh.shape, mesh.coordinates)
    return local.detach()[tuple(slice(size) for size in box.size)], box.slices


def _reduced(gradient: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    shard = placement.shards.get(Axis.TP)
    if Axis.TP in placement.partial:
        return all_reduce(gradient, mesh[Axis.TP])
    if shard is not None and shard.copies > 1:
        first = mesh[Axis.TP].rank // shard.copies * shard.copies
        return all_reduce(gradient, mesh.subgroup(Axis.TP, range(first, first + shard.copies)))
    return gradient
