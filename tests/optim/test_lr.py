"""The learning rate at given steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastack.errors import ConfigError
from megastack.optim.lr import LearningRate

COSINE = LearningRate("cosine", 1.0, warmup_steps=4, total_steps=20, floor=0.1)


def test_cosine_after_warm_up_has_known_values() -> None:
    assert [COSINE.at(t) for t in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert [round(COSINE.at(t), 5) for t in (9, 10, 11)] == [0.80001, 0.72221, 0.63779]


def test_a_resumed_schedule_is_the_uninterrupted_one() -> None:
    straight = [COSINE.at(t) for t in range(20)]
    again = LearningRate("cosine", 1.0, warmup_steps=4, total_steps=20, floor=0.1)
    assert [COSINE.at(t) for t in range(10)] + [again.at(t) for t in range(10, 20)] == straight


def test_the_peak_is_reached_at_the_end_of_warm_up_and_the_floor_at_the_total() -> None:
    for name in ("cosine", "linear", "wsd"):
        rate = LearningRate(name, 3e-4, warmup_steps=5, total_steps=50, floor=0.1)
        assert rate.at(4) == rate.at(5) == 3e-4
        assert rate.at(50) == pytest.approx(3e-5) == rate.at(5000)


def test_linear_and_constant() -> None:
    linear = LearningRate("linear", 2.0, warmup_steps=2, total_steps=12, floor=0.0)
    assert linear.at(7) == pytest.approx(1.0)
    constant = LearningRate("constant", 2.0, warmup_steps=2, total_steps=12)
    assert {constant.at(t) for t in range(2, 99)} == {2.0}


def test_wsd_decays_over_its_last_steps_only() -> None:
    rate = LearningRate("wsd", 1.0, warmup_steps=3, total_steps=20, decay_steps=4, floor=0.2)
    assert {rate.at(t) for t in range(3, 17)} == {1.0}
    assert [rate.at(t) for t in range(17, 21)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert LearningRate("wsd", 1.0, total_steps=20).decay_length == 4


@given(
    st.sampled_from(["constant", "cosine", "linear", "wsd"]),
    st.integers(0, 30),
    st.integers(1, 60),
    st.integers(0, 100),
    st.floats(0, 1),
)
def test_a_rate_lies_between_zero_and_the_peak_and_never_rises_after_warm_up(
    name: str, warmup: int, total: int, step: int, floor: float
) -> None:
    rate = LearningRate(name, 1.0, warmup_steps=warmup, total_steps=total, floor=floor)
    assert 0 <= rate.at(step) <= 1 and math.isfinite(rate.at(step))
    if step < warmup:
        assert rate.at(step) > 0
    else:
        assert rate.at(step + 1) <= rate.at(step)


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"schedule": "cosin"}, "lr.schedule=cosin"),
        ({"warmup_steps": -1}, "lr.warmup_steps=-1"),
        ({"total_steps": 0}, "lr.total_steps=0"),
        ({"floor": 1.5}, "lr.floor=1.5"),
        ({"lr": -1.0}, "optim.lr=-1.0"),
        ({"decay_steps": 5}, "lr.decay_steps=5"),
        ({"schedule": "wsd", "decay_steps": 18, "warmup_steps": 4}, "lr.decay_steps=18"),
    ],
)
def test_invalid_values_are_errors_by_key(bad: dict, key: str) -> None:
    values = {"schedule": "cosine", "lr": 1.0, "total_steps": 20} | bad
    with pytest.raises(ConfigError, match=key):
        LearningRate(**values)
