"""Items check themselves before anything is written or read."""

import pytest
import torch

from megastack.checkpoint.items import State, StateItem
from megastack.errors import CheckpointError
from megastack.placement.boxes import Box


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


def test_every_fault_is_named_at_once() -> None:
    items = [
        StateItem.replicated("twice", torch.zeros(2)),
        StateItem.replicated("twice", torch.zeros(2)),
        StateItem("shape", (4,), ((Box((0,), (3,)), torch.zeros(2)),)),
        StateItem("dtypes", (4,), ((Box((0,), (2,)), torch.zeros(2)), (Box((2,), (2,)), torch.zeros(2).double()))),
        StateItem.replicated("complex", torch.zeros(2, dtype=torch.complex64)),
    ]
    with pytest.raises(CheckpointError) as raised:
        State(items).by_name()
    assert all(name in str(raised.value) for name in ("twice: given 2 times", "shape: box [0:3]", "dtypes", "complex"))
