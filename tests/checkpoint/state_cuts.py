"""States of odd shapes, sharded over ranks in several ways, with a different value in every element."""

import math

import torch
from torch import Tensor

from megastack.checkpoint.state import State, StateItem
from megastack.placement.boxes import Box, range_boxes, whole_box

TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model/embedding.weight": ((37, 7), torch.float32),
    "model/blocks.0.mlp.up.weight": ((2, 5, 7), torch.bfloat16),
    "model/norm.weight": ((3,), torch.float32),
    "optim/exp_avg/embedding.weight": ((37, 7), torch.float64),
    "optim/exp_avg/norm.weight": ((3,), torch.float32),
    "optim/mask": ((5,), torch.bool),
    "optim/step": ((), torch.float32),
}
CUTS = ("whole", "rows", "columns", "flat", "stages")


def tensor_of(name: str) -> Tensor:
    """The global tensor of a name: all elements differ, within the tensor and (except booleans) between tensors."""
    shape, dtype = TENSORS[name]
    numbers = torch.arange(math.prod(shape)) + 300 * list(TENSORS).index(name)
    if dtype is torch.bool:
        return (numbers % 3 == 0).view(shape)
    if dtype is torch.bfloat16:
        return (numbers + 0x3F80).to(torch.int16).view(dtype).view(shape)
    return numbers.to(dtype).view(shape)


def boxes_of(name: str, cut: str, rank: int, world: int) -> list[Box]:
    """The boxes of a tensor that a rank holds under a kind of sharding."""
    shape = TENSORS[name][0]
    if cut == "stages":
        return [whole_box(shape)] if list(TENSORS).index(name) % world == rank else []
    if cut == "whole" or not shape:
        return [whole_box(shape)]
    if cut == "flat":
        count = math.prod(shape)
        part = -(-count // world)
        return list(range_boxes(shape, min(count, rank * part), min(count, (rank + 1) * part)))
    dim = 0 if cut == "rows" else len(shape) - 1
    start, stop = (shape[dim] * index // world for index in (rank, rank + 1))
    offset, size = [0] * len(shape), list(shape)
    offset[dim], size[dim] = start, stop - start
    return [Box(tuple(offset), tuple(size))]


def state_of(cut: str, rank: int, world: int, *, blank: bool = False, only: str = "") -> State:
    """A rank's state; blank tensors are zero, for loading."""
    items = []
    for name in TENSORS:
        if only and not name.startswith(only):
            continue
        boxes = boxes_of(name, cut, rank, world)
        parts = [tensor_of(name)[box.slices].clone() for box in boxes]
        if blank:
            parts = [torch.zeros_like(part) for part in parts]
        if boxes or cut != "stages":
            items.append(StateItem(name, TENSORS[name][0], tuple(zip(boxes, parts, strict=True))))
    return State(items, {"step": 10, "cut": cut})


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Bitwise equality, dtype and shape included."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def wrong_items(state: State) -> list[str]:
    """Names of items that do not hold the values of :func:`tensor_of`."""
    return [
        item.name
        for item in state.items
        for box, tensor in item.boxes
        if not same_bits(tensor, tensor_of(item.name)[box.slices])
    ]
