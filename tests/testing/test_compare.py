"""The metric of parity: what is allowed, what is reported, and that nothing that is not a number passes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megastack.testing.compare import Trace, differences, least_squares_ratio

SMALL, LARGE = torch.tensor([1e-6, -2e-6]), torch.tensor([1.0, -2.0])


def trace(**changes: Any) -> Trace:
    """One step with a large and a small tensor."""
    named = {"large": LARGE.double(), "small": SMALL.double()}
    made = Trace(initial=dict(named), losses=[2.0], norms=[3.0], rates=[0.1])
    made.add_gradients(named | changes.pop("gradients", {}), changes.pop("spread", {}))
    made.add_weights(named | changes.pop("weights", {}), {})
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def off(x: Tensor, by: float) -> Tensor:
    changed = x.double().clone()
    changed[0] += by
    return changed


def kinds(other: Trace, **options: Any) -> list[tuple[str, str]]:
    found = differences(trace(), other, tolerance=options.pop("tolerance", 1e-3), **options)
    return [(difference.kind, difference.name) for difference in found]


def test_equal_traces_have_no_differences() -> None:
    assert kinds(trace(), tolerance=1e-300) == []


@pytest.mark.parametrize(("by", "reported"), [(1.9e-3, False), (2.1e-3, True)])
def test_a_gradient_is_measured_by_the_largest_element_of_its_tensor(by: float, reported: bool) -> None:
    assert kinds(trace(gradients={"large": off(LARGE, by)})) == [("gradient", "large")] * reported


@pytest.mark.parametrize(("by", "reported"), [(1.9e-6, False), (2.1e-6, True)])
def test_a_small_tensor_is_measured_by_a_thousandth_of_the_largest(by: float, reported: bool) -> None:
    assert kinds(trace(gradients={"small": off(SMALL, by)})) == [("gradient", "small")] * reported


def test_weights_after_adam_in_fp32_may_differ_by_a_tenth_of_a_learning_rate() -> None:
    near, far = trace(weights={"large": off(LARGE, 0.009)}), trace(weights={"large": off(LARGE, 0.011)})
    assert kinds(near) == [("weight", "large")]
    assert kinds(near, adam_fp32=True) == []
    assert kinds(far, adam_fp32=True) == [("weight", "large")]


def test_losses_and_norms_are_relative() -> None:
    assert kinds(trace(losses=[2.0019], norms=[3.0029])) == []
    assert kinds(trace(losses=[2.0021], norms=[3.0031])) == [("loss", ""), ("norm", "")]


def test_initial_weights_must_be_bitwise_identical() -> None:
    changed = trace(initial={"large": LARGE.double(), "small": off(SMALL, 1e-20)})
    assert kinds(changed) == [("initial weight", "small")]


def test_replicas_must_be_bitwise_identical() -> None:
    (found,) = differences(trace(), trace(spread={"large": 4e-12}), tolerance=1e-10)
    assert (found.kind, found.name) == ("replicas of gradient", "large")
    assert found.distance == pytest.approx(0.02)
    assert (
        str(found)
        == "step 1: replicas of gradient large differ between ranks by 0.02 × the tolerance, but must be identical"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_differ(value: float) -> None:
    assert kinds(trace(losses=[value], norms=[value])) == [("loss", ""), ("norm", "")]
    assert kinds(trace(gradients={"small": off(SMALL, value)})) == [("gradient", "small")]


def test_different_names_are_an_error() -> None:
    with pytest.raises(AssertionError, match=r"gradient: different names, \['extra'\]"):
        kinds(trace(gradients={"extra": LARGE}))


def test_a_factor_is_reported() -> None:
    (found,) = differences(trace(), trace(gradients={"large": 2 * LARGE.double()}), tolerance=1e-10)
    assert found.ratio == pytest.approx(2)
    assert str(found) == "step 1: gradient large differs by 1e+10 × the tolerance (2 × the reference)"
    assert least_squares_ratio(torch.zeros(2), torch.ones(2)) == math.inf
