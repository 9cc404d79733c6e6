"""What lies in slices of flat buckets becomes boxes of global tensors, and moves to any other cut."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from megastack.checkpoint.collect import optimizer_items, part_items, stage_placements
from megastack.checkpoint.items import State
from megastack.checkpoint.load import load
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.gradients.buckets import GradientBuckets
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.optim.optimizer import Optimizer, build_optimizer
from megastack.optim.update_rules import OptimizerOptions
from megastack.placement.boxes import Box
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Placement, Shard
from megastack.testing.ranks import run_ranks

SHAPES = {"three": (3,), "five": (5,), "seven": (7,), "matrix": (6, 5), "rows": (37, 3), "scalar": ()}


class Odd(ParallelModule):
    """Parameters whose sizes no degree divides, one padded and cut over tp, one cut over tp with copies."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.create_parameters()
        self.to(torch.bfloat16)

    def placements(self) -> dict[str, Placement]:
        cut = {"matrix": {Axis.TP: Shard(0)}, "rows": {Axis.TP: Shard(0)}}
        padded = {"rows": (40, 3)}
        return {
            name: Placement(shape, cut.get(name, {}), padded_shape=padded.get(name)) for name, shape in SHAPES.items()
        }


def sentinel(kind: str, name: str) -> torch.Tensor:
    """A value for each element that names its kind, parameter and place."""
    first = 1000 * list(SHAPES).index(name) + 100_000 * ["exp_avg", "exp_avg_sq", "master"].index(kind)
    return torch.arange(first, first + prod(SHAPES[name]), dtype=torch.float32).view(SHAPES[name])


def state_of(mesh: Mesh, zero: int, shard_size: int | None) -> tuple[Optimizer, State]:
    module = Odd(mesh)
    buckets = GradientBuckets([module], mesh, zero=zero, shard_size=shard_size, bucket_bytes=64)
    optimizer = build_optimizer(buckets, OptimizerOptions("adamw"))
    kinds = optimizer.moments() | {"master": optimizer.main_parameters()}
    return optimizer, State(optimizer_items(kinds, stage_placements([module]), mesh))


def write_sentinels(shape: MeshShape, zero: int, shard_size: int | None, path: str) -> int:
    mesh = Mesh.from_environment(shape)
    _, state = state_of(mesh, zero, shard_size)
    for item in state.items:
        _, kind, name = item.name.split("/")
        for box, part in item.boxes:
            part.copy_(sentinel(kind, name)[box.slices])
    save(path, state, mesh).wait()
    return sum(len(item.boxes) for item in state.items)


def read_sentinels(shape: MeshShape, zero: int, shard_size: int | None, path: str) -> int:
    mesh = Mesh.from_environment(shape)
    _, state = state_of(mesh, zero, shard_size)
    load(path, state, mesh)
    elements = 0
    for item in state.items:
        _, kind, name = item.name.split("/")
        for box, part in item.boxes:
            assert torch.equal(part, sentinel(kind, name)[box.slices]), item.name
            elements += part.numel()
    return elements


LAYOUTS = [
    (MeshShape(), 0, None),
    (MeshShape(dp=3), 1, None),
    (MeshShape(dp=4), 1, 2),
    (MeshShape(dp=2, tp=2), 1, None),
    (MeshShape(tp=2), 0, None),
]


@pytest.mark.parametrize("source", [(MeshShape(dp=4), 1, None), (MeshShape(dp=2, tp=2), 1, None), LAYOUTS[0]], ids=str)
def test_moments_and_masters_move_by_name_bitwise(source: tuple[MeshShape, int, int | None], tmp_path: Path) -> None:
    path = str(tmp_path / "step_00000001")
    run_ranks(write_sentinels, source[0].world_size, *source, path)
    reader = CheckpointReader(path)
    for stored in reader.names:
        _, kind, name = stored.split("/")
        assert torch.equal(reader.read(stored), sentinel(kind, name))
    for target in LAYOUTS:
        counts = run_ranks(read_sentinels, target[0].world_size, *target, path)
        assert sum(counts) >= 3 * sum(map(prod, SHAPES.values()))


def test_a_slice_is_a_few_boxes_of_each_parameter_without_padding() -> None:
    placement = Placement((3, 4), padded_shape=(4, 4))
    flat = torch.arange(16.0)
    parts = [(Box((1, 2), (1, 2)), flat[6:8].view(1, 2)), (Box((2, 0), (2, 4)), flat[8:].view(2, 4))]
    (item,) = part_items("x", [("w", parts)], {"w": placement}, Mesh.single())
    assert [(box.offset, box.size, part.flatten().tolist()) for box, part in item.boxes] == [
        ((1, 2), (1, 2), [6.0, 7.0]),
        ((2, 0), (1, 4), [8.0, 9.0, 10.0, 11.0]),
    ]
