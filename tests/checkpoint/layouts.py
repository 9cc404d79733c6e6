"""States as real layouts shard them: stages, tensor shards with replicas and padding, flat slices, last-dim shards.

A state is described by a mesh shape and by how data ranks shard the optimizer state; the parameters are few and have
odd sizes on purpose. Every element of every tensor differs, so a wrong box cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megastack.checkpoint.state import State, StateItem
from megastack.mesh.shape import Axis, MeshShape
from megastack.placement.boxes import Box, intersect, local_box, local_shape, range_boxes
from megastack.placement.placement import Placement, Shard

ZERO_KINDS = ("exp_avg", "exp_avg_sq", "master")


@dataclass(frozen=True)
class Layout:
    """A mesh shape and the sharding over data ranks.

    Attributes:
        cut: ``none`` (replicated), ``flat`` (slices of one flat buffer per stage, optimizer state only) or ``last``
            (the last dim of all tensors, including weights, in uneven parts).
        alignment: flat slices are whole multiples of this, so that the last ranks may hold nothing.
    """

    shape: MeshShape
    cut: str = "none"
    alignment: int = 1

    def __str__(self) -> str:
        degrees = "".join(f"{axis}{self.shape.size(axis)}" for axis in (Axis.PP, Axis.DP, Axis.TP))
        return f"{degrees}-{self.cut}{self.alignment if self.alignment > 1 else ''}"


LAYOUTS = (
    Layout(MeshShape()),
    Layout(MeshShape(dp=2), "flat"),
    Layout(MeshShape(pp=3)),
    Layout(MeshShape(dp=3), "flat"),
    Layout(MeshShape(tp=4)),
    Layout(MeshShape(dp=5), "flat", 64),
    Layout(MeshShape(dp=3, tp=2), "flat", 4),
    Layout(MeshShape(dp=7), "last"),
    Layout(MeshShape(pp=2, dp=2, tp=2), "flat", 16),
    Layout(MeshShape(pp=2, tp=4)),
)


def parameters(tp: int) -> dict[str, tuple[Placement, float]]:
    """The model by global name: a placement, and the position of its stage along the depth (0 to 1)."""
    kv = Shard(0, copies=max(1, tp // 2))
    return {
        "embedding.weight": (Placement((37, 5), {Axis.TP: Shard(0)}, padded_shape=(40, 5)), 0.0),
        "blocks.0.norm.weight": (Placement((5,)), 0.0),
        "blocks.0.attention.q.weight": (Placement((4, 3, 5), {Axis.TP: Shard(0)}), 0.0),
        "blocks.0.attention.kv.weight": (Placement((2, 2, 3, 5), {Axis.TP: kv}), 0.0),
        "blocks.1.mlp.up.weight": (Placement((2, 12, 7), {Axis.TP: Shard(1)}), 0.4),
        "blocks.1.mlp.down.weight": (Placement((7, 12), {Axis.TP: Shard(1)}), 0.4),
        "blocks.1.scale": (Placement((3,)), 0.4),
        "blocks.2.gain": (Placement((7,)), 0.9),
        "blocks.2.one": (Placement((1,)), 0.9),
    }


def global_tensor(name: str) -> Tensor:
    """The values of a tensor of the state; weights are bf16, optimizer state is fp32."""
    kind, _, parameter = name.removeprefix("optim/").rpartition("/")
    names = list(parameters(1))
    shape = parameters(1)[parameter][0].shape
    seed = names.index(parameter) + 100 * (["model", *ZERO_KINDS].index(kind))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.bfloat16() if kind == "model" else values


def state_of(layout: Layout, rank: int, *, blank: bool = False) -> State:
    """The state of one rank of a layout, filled or blank."""
    items = []
    for name, boxes in named_boxes(layout, rank):
        whole = global_tensor(name)
        parts = [torch.full(box.size, -7.0, dtype=whole.dtype) if blank else whole[box.slices].clone() for box in boxes]
        items.append(StateItem(name, tuple(whole.shape), tuple(zip(boxes, parts, strict=True))))
    return State(items, {"layout": str(layout)})


def wrong_names(state: State) -> list[str]:
    """Tensors whose boxes do not have the expected bits."""
    return [
        item.name
        for item in state.items
        for box, part in item.boxes
        if not torch.equal(bits(part), bits(global_tensor(item.name)[box.slices]))
    ]


def bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def named_boxes(layout: Layout, rank: int) -> Iterator[tuple[str, list[Box]]]:
    """The boxes of every item of a rank; items of other stages are absent, items of empty slices have no boxes."""
    shape, here = layout.shape, layout.shape.coordinates(rank)
    stage = [
        (name, placement)
        for name, (placement, depth) in parameters(shape.tp).items()
        if int(depth * shape.pp) == here[Axis.PP]
    ]
    locals_ = {name: local_box(placement, shape, here) for name, placement in stage}
    for name, box in locals_.items():
        yield f"model/{name}", last_dim(box, layout, here[Axis.DP]) if layout.cut == "last" else [box]
    for kind in ZERO_KINDS:
        for name, boxes in optimizer_boxes(layout, dict(stage), locals_, here[Axis.DP]).items():
            yield f"optim/{kind}/{name}", boxes


def optimizer_boxes(
    layout: Layout, stage: dict[str, Placement], locals_: dict[str, Box], dp: int
) -> dict[str, list[Box]]:
    if layout.cut == "none":
        return {name: [box] for name, box in locals_.items()}
    if layout.cut == "last":
        return {name: last_dim(box, layout, dp) for name, box in locals_.items()}
    sizes = {name: local_shape(placement, layout.shape) for name, placement in stage.items()}
    total = sum(math.prod(size) for size in sizes.values())
    part = -(-total // (layout.shape.dp * layout.alignment)) * layout.alignment
    start, found = 0, {}
    for name, size in reversed(sizes.items()):
        count = math.prod(size)
        first, last = (min(max(edge - start, 0), count) for edge in (dp * part, (dp + 1) * part))
        moved = (shifted(box, locals_[name].offset) for box in range_boxes(size, first, last))
        found[name] = [common for box in moved if (common := intersect(box, locals_[name]))]  # padding is not saved
        start += count
    return found


def shifted(box: Box, offset: tuple[int, ...]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offset, offset, strict=True)), box.size)


def last_dim(box: Box, layout: Layout, dp: int) -> list[Box]:
    """This data rank's shard of a box along the last dim; the last shards may be empty."""
    part = -(-box.size[-1] // layout.shape.dp)
    first, last = (min(edge * part, box.size[-1]) for edge in (dp, dp + 1))
    offset, size = (*box.offset[:-1], box.offset[-1] + first), (*box.size[:-1], last - first)
    return [Box(offset, size)] if last > first else []
