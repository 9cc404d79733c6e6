"""Recorded module calls, and the part of a tensor that a rank holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megastack.batch import Microbatch
from megastack.testing.module_trace import CallRecorder, ModuleCall, ModuleTracer, TPRank, find_reshaped, tp_shard

X = torch.randn(2, 8, 4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("shape", "place", "expected"),
    [
        ((2, 8, 4), TPRank(1, 2), X),
        ((2, 4, 4), TPRank(1, 2), X[:, 4:]),
        ((2, 8, 1), TPRank(2, 4), X[..., 2:3]),
        ((2, 8, 2), TPRank(1, 4), X[..., :2]),
        ((2, 8, 2), TPRank(2, 4), X[..., 2:]),
    ],
)
def test_the_shard_of_a_rank_follows_from_the_shape(shape: tuple[int, ...], place: TPRank, expected: Tensor) -> None:
    found = tp_shard(X, shape, place)
    assert found is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(2, 4, 2), (2, 8), (2, 3, 4), (4, 8, 4)])
def test_a_shape_that_is_not_a_shard_cannot_be_compared(shape: tuple[int, ...]) -> None:
    assert tp_shard(X, shape, TPRank(0, 2)) is None


def test_a_composed_module_that_changes_a_shape_is_named() -> None:
    expected = {name: ModuleCall({0: X}, {0: X}) for name in ("a.down", "a")}
    actual = {name: ModuleCall({0: X[:, :4]}, {0: X}) for name in ("a.down", "a")}
    assert find_reshaped(expected, actual, {"a"}) == ("a", (2, 4, 4), (2, 8, 4))
    assert find_reshaped(expected, expected, {"a"}) is None


class Forked(nn.Module):
    """Two layers with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        hidden = hidden * 1
        return self.left(hidden).sum() + 2 * self.right(hidden).sum()


def microbatch(first: int, step: int = 0) -> Microbatch:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    return Microbatch(ids, ids, ids, None, torch.tensor([first]), step=step)


def test_a_tracer_records_chosen_microbatches_of_the_first_step_with_a_gradient_for_each_use() -> None:
    stage = Forked()
    tracer = ModuleTracer([stage], [3])
    x = torch.randn(2, 4, requires_grad=True)
    for chosen in (microbatch(1), microbatch(3), microbatch(3, step=1)):
        stage(x, chosen).backward()
    assert list(tracer.traces) == [3]
    assert list(tracer.traces[3]) == ["left", "right"]
    left, right = tracer.traces[3]["left"], tracer.traces[3]["right"]
    torch.testing.assert_close(left.input_gradients[0], stage.left.weight.sum(0).expand(2, 4))
    torch.testing.assert_close(right.input_gradients[0], 2 * stage.right.weight.sum(0).expand(2, 4))
    assert tracer.recorder.running == ()


class Named(nn.Module):
    """Accepts its input by keyword, in a container, and returns a mapping."""

    def forward(self, *, given: list[Tensor]) -> dict[str, Tensor]:
        return {"sum": given[0] + given[1]}


def test_tensors_in_containers_and_by_keyword_are_recorded_and_a_failed_call_stays_open() -> None:
    layer = Named()
    recorder = CallRecorder([("", layer)])
    recorder.trace = trace = {}
    layer(given=[X, 2 * X])
    assert list(trace[""].inputs) == ["given.0", "given.1"]
    torch.testing.assert_close(trace[""].outputs["0.sum"], 3 * X)
    trace.clear()
    with pytest.raises(IndexError):
        layer(given=[X])
    assert recorder.running == ("",)


def test_a_recomputed_call_is_recorded_once_with_the_gradients_of_the_second() -> None:
    layer = nn.Linear(4, 4).double()
    recorder = CallRecorder([("a", layer)])
    recorder.trace = trace = {}
    x = X.clone().requires_grad_()
    with torch.no_grad():
        first = layer(x)
    (2 * layer(x)).sum().backward()
    torch.testing.assert_close(trace["a"].outputs[0], first)
    torch.testing.assert_close(trace["a"].input_gradients[0], x.grad)
    assert trace["a"].output_gradients
