"""Which module is to blame: parts against the whole, own faults against inherited ones, faults that are put right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megastack.batch import Microbatch
from megastack.testing.module_trace import ModuleTracer, Place, Seen, find_faults, find_reshaped, share_of

TOLERANCE = 1e-10
X = torch.randn(2, 8, 4, dtype=torch.float64)
WRONG = X + 1.0


@pytest.mark.parametrize(
    ("shape", "place", "expected"),
    [
        ((2, 8, 4), Place(1, 2), X),
        ((2, 4, 4), Place(1, 2), X[:, 4:]),
        ((2, 8, 1), Place(2, 4), X[..., 2:3]),
        ((2, 8, 2), Place(1, 4), X[..., :2]),
        ((2, 8, 2), Place(2, 4), X[..., 2:]),
    ],
)
def test_the_share_of_a_rank_follows_from_the_shape(shape: tuple[int, ...], place: Place, expected: Tensor) -> None:
    found = share_of(X, shape, place)
    assert found is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(2, 4, 2), (2, 8), (2, 3, 4), (4, 8, 4)])
def test_a_shape_that_is_no_share_cannot_be_compared(shape: tuple[int, ...]) -> None:
    assert share_of(X, shape, Place(0, 2)) is None


def seen(given: Tensor, taken: Tensor = X, **gradients: Tensor) -> Seen:
    return Seen(
        {0: taken}, {0: given}, *({0: gradients[name]} if name in gradients else {} for name in ("left", "came"))
    )


def blamed(expected: dict[str, Seen], actual: dict[str, Seen], side: str = "forward") -> str | None:
    found = [f for f in find_faults(expected, actual, Place(0, 2), TOLERANCE) if f.side == side]
    return found[0].module if found else None


def test_the_first_module_whose_input_is_right_is_blamed_and_not_those_after_it() -> None:
    expected = {name: seen(X) for name in ("a.up", "a.down", "a", "b")}
    actual = {"a.up": seen(X), "a.down": seen(WRONG, WRONG), "a": seen(WRONG), "b": seen(WRONG, WRONG)}
    assert blamed(expected, actual) == "a"
    assert blamed(expected, actual | {"a.down": seen(WRONG)}) == "a.down"


def test_a_part_that_the_module_around_it_puts_right_is_no_fault() -> None:
    expected = {name: seen(X) for name in ("a.partial", "a", "b")}
    actual = {"a.partial": seen(WRONG), "a": seen(X), "b": seen(WRONG)}
    assert blamed(expected, actual) == "b"


def test_right_shares_and_rounding_blame_nobody() -> None:
    expected = {"a": seen(X)}
    assert blamed(expected, {"a": seen(X[:, :4] * (1 + 1e-14), X[:, :4])}) is None
    assert blamed(expected, {"a": seen(X[:, 4:], X[:, :4])}) == "a"
    assert blamed(expected, {"a": seen(X * torch.nan)}) == "a"


def test_the_innermost_module_around_the_first_break_seen_from_the_loss_is_blamed_in_the_backward() -> None:
    names = ("b0.mlp", "b0", "b1.attention", "b1.mlp.up", "b1.mlp", "b1")
    expected = {name: seen(X, left=X, came=X) for name in names}
    late = {name: seen(X, left=WRONG, came=WRONG) for name in ("b0.mlp", "b0", "b1.attention")}
    broken = {name: seen(X, left=WRONG, came=X) for name in ("b1.mlp", "b1")}
    actual = {name: (late | broken).get(name, expected[name]) for name in names}
    assert blamed(expected, actual, "backward") == "b1.mlp"
    assert blamed(expected, actual) is None


def test_a_composed_module_that_changes_a_shape_is_named() -> None:
    expected, actual = {"a.down": seen(X), "a": seen(X)}, {"a.down": seen(X, X[:, :4]), "a": seen(X, X[:, :4])}
    assert find_reshaped(expected, actual, {"a"}) == (
        "a gives (2, 8, 4) for an input of (2, 4, 4); on one rank they are of one shape"
    )
    assert find_reshaped(expected, expected, {"a"}) is None


class Forked(nn.Module):
    """Two layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, carry: Tensor, microbatch: Microbatch) -> Tensor:
        hidden = carry * 1
        return self.left(hidden).sum() + 2 * self.right(hidden).sum()


def microbatch(first: int, step: int = 0) -> Microbatch:
    ids = torch.zeros(1, 4, dtype=torch.int64)
    return Microbatch(ids, ids, ids, None, torch.tensor([first]), step=step)


def test_a_tracer_keeps_chosen_microbatches_of_the_first_step_and_each_use_has_its_own_gradient() -> None:
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
    assert tracer.running == ""
