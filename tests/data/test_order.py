"""The infinite order: every epoch is a permutation, and every entry a function of seed and number."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.data.order import SampleOrder


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_each_epoch_holds_every_sample_once(count: int, seed: int, epoch: int) -> None:
    entries = np.arange(epoch * count, (epoch + 1) * count)
    assert sorted(SampleOrder(count, seed).many(entries)) == list(range(count))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_an_entry_does_not_depend_on_other_lookups(count: int, entries: list[int]) -> None:
    order = SampleOrder(count, 3)
    together = order.many(np.array(entries)).tolist()
    assert together == [SampleOrder(count, 3)[entry] for entry in entries]
    assert together == [order[entry] for entry in entries]


def test_epochs_and_seeds_differ() -> None:
    first, second = SampleOrder(100, 0).many(np.arange(200)).reshape(2, 100)
    assert first.tolist() != second.tolist()
    assert first.tolist() != SampleOrder(100, 1).many(np.arange(100)).tolist()
    assert first.tolist() != list(range(100))


def test_a_large_set_is_shuffled_without_a_table() -> None:
    count = 3_000_000_000
    samples = SampleOrder(count, 0).many(np.arange(count - 500, count + 500))
    assert len(set(samples.tolist())) > 990
    assert samples.min() >= 0 and samples.max() < count and samples.max() > 2**31
