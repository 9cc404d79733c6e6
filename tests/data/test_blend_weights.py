"""Weights of a blend as fractions, and their history across resumes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastack.data.blend_weights import (
    WeightChange,
    extend_history,
    history_from_json,
    history_to_json,
    missing_sources,
    normalized,
)

A = {"a": 0.1, "b": 0.2, "c": 0.7}
B = {"a": 0.6, "b": 0.0, "c": 0.4}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda weights: sum(weights) > 1e-300))
def test_normalized_ordinary_weights_are_the_plain_quotients_to_the_last_bit(weights: list[float]) -> None:
    assert normalized(weights) == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-12)
    if min((w for w in weights if w), default=1.0) > 1e-290:
        assert normalized(weights) == [weight / sum(weights) for weight in weights]


def test_the_history_survives_a_checkpoint() -> None:
    first = extend_history((), 0, A)
    assert extend_history(first, 40, A) == first
    second = extend_history(history_from_json(history_to_json(first)), 40, B)
    assert second == (WeightChange(0, A), WeightChange(40, B))
    assert extend_history(second, 40, A) == (WeightChange(0, A),)  # the second weights were never used
    assert missing_sources(second, A) == 0 and missing_sources(second, {"a": 1.0}) == 2
