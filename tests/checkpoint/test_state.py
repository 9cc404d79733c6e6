"""Items check themselves, and slices of flat buckets become boxes of global tensors that load on any other layout."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch

from megastack.checkpoint.load import load
from megastack.checkpoint.reader import CheckpointReader
from megastack.checkpoint.save import save
from megastack.checkpoint.state import State, StateItem, box_items, optimizer_items, stage_placements
from megastack.errors import CheckpointError
from megastack.gradients.buckets import GradientBuckets
from megastack.mesh.mesh import Mesh
from megastack.mesh.shape import Axis, MeshShape
from megastack.optim.optimizer import Optimizer, build_optimizer
from megastack.optim.update_rules import OptimizerOptions
from megastack.placement.boxes import Box
from megastack.placement.module import ParallelModule
from megastack.placement.placement import Placement, Shard
from megastack.testing.ranks import run_ranks


def test_a_replicated_item_is_one_whole_box() -> None:
    item = StateItem.replicated("model/w", torch.zeros(3, 5))
    assert item.shape == (3, 5)
    assert [box for box, _ in item.boxes] == [Box((0, 0), (3, 5))]
    assert item.dtype is torch.float32
    assert StateItem("model/w", (3, 5), ()).dtype is None


def test_empty_boxes_of_a_filled_tensor_are_left_out() -> None:
    empty = (Box((3, 0), (0, 5)), torch.zeros(0, 5))
    assert list(StateItem("w", (3, 5), (empty,)).filled_boxes()) == []
    assert len(list(StateItem.replicated("w", torch.zeros(0, 5)).filled_boxes())) == 1


def test_every_error_is_in_one_report() -> None:
    items = [
        StateItem.replicated("twice", torch.zeros(2)),
        StateItem.replicated("twice", torch.zeros(2)),
        StateItem("shape", (4,), ((Box((0,), (3,)), torch.zeros(2)),)),
        StateItem("dtypes", (4,), ((Box((0,), (2,)), torch.zeros(2)), (Box((2,), (2,)), torch.zeros(2).double()))),
        StateItem.replicated("complex", torch.zeros(2, dtype=torch.complex64)),
    ]
    with pytest.raises(CheckpointError) as raised:
        State(items).by_name()
    assert all(name in str(raised.value) for name in ("twice: occurs 2 times", "shape: box [0:3]", "dtypes", "complex"))


SHAPES = {"three": (3,), "five": (5,), "seven": (7,), "matrix": (6, 5), "rows": (37, 3), "scalar": ()}


class Odd(ParallelModule):
    """Parameters whose sizes are not divisible by any degree, one sharded over tp, one padded and sharded over tp."""

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
    """Values that identify kind, parameter and position of each element."""
    first = 1000 * list(SHAPES).index(name) + 100_000 * ["exp_avg", "exp_avg_sq", "master"].index(kind)
    return torch.arange(first, first + prod(SHAPES[name]), dtype=torch.float32).view(SHAPES[name])


def state_of(mesh: Mesh, zero: int, shard_size: int | None) -> tuple[Optimizer, State]:
    module = Odd(mesh)
    buckets = GradientBuckets([module], mesh, zero=zero, shard_size=shard_size, bucket_size=16)
    optimizer = build_optimizer(buckets, OptimizerOptions("adamw"))
    states = optimizer.moments() | {"master": optimizer.main_parameters()}
    return optimizer, State(optimizer_items(states, stage_placements([module]), mesh))


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
def test_moments_and_main_parameters_are_restored_bitwise_by_name(
    source: tuple[MeshShape, int, int | None], tmp_path: Path
) -> None:
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
    (item,) = box_items("x", [("w", parts)], {"w": placement}, Mesh.single())
    assert [(box.offset, box.size, part.flatten().tolist()) for box, part in item.boxes] == [
        ((1, 2), (1, 2), [6.0, 7.0]),
        ((2, 0), (1, 4), [8.0, 9.0, 10.0, 11.0]),
    ]
