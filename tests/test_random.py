"""Counter-based numbers: known answers, independence of the layout, and statistics."""

from __future__ import annotations

import itertools
import math
import pickle
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megastack import random as numbers
from megastack.errors import ConfigError
from megastack.placement.boxes import Box
from megastack.random import Permutation, counter_bits, counter_normal, dropout_mask, stream_key


def whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def chi_square_excess(counts: torch.Tensor) -> float:
    """The standard deviations by which the chi-square statistic of equally likely cells exceeds its mean."""
    expected = counts.sum().item() / counts.numel()
    freedom = counts.numel() - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


class TestKeysAndBits:
    def test_bits_equal_splitmix64(self) -> None:
        outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
        bits = counter_bits(0, torch.tensor([1, 2, 3]))
        assert [value % 2**64 for value in bits.tolist()] == outputs

    def test_a_tensor_of_keys_gives_the_bits_of_each_key(self) -> None:
        index = torch.arange(5)
        table = counter_bits(torch.tensor([3, -7])[:, None], index)
        assert torch.equal(table, torch.stack([counter_bits(3, index), counter_bits(-7, index)]))

    def test_inputs_are_not_modified(self) -> None:
        key, index = torch.tensor([5]), torch.arange(3)
        counter_bits(key, index)
        assert key.tolist() == [5] and index.tolist() == [0, 1, 2]

    def test_keys_depend_on_value_type_order_and_division_of_their_parts(self) -> None:
        parts = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", ""), (1, 2), ("1", 2), (12,), (-1,), ("a, 'b",)]
        keys = {stream_key(*part) for part in parts}
        assert len(keys) == len(parts)
        assert all(0 <= key < 2**64 for key in keys)

    def test_a_key_is_the_same_in_every_process(self) -> None:
        assert stream_key(7, "order", 0) == 0x8E837471A5CF1E4C
        assert stream_key(np.int64(7), "order", 0) == stream_key(7, "order", 0)


boxes = st.lists(st.integers(1, 7), max_size=4).flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)),
        st.tuples(*(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape)).map(
            lambda ends: Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        ),
    )
)


class TestNormal:
    @given(boxes, st.sampled_from([1, 5, 64]))
    def test_a_box_holds_the_numbers_of_the_whole(self, case: tuple[tuple[int, ...], Box], chunk: int) -> None:
        shape, box = case
        full = counter_normal(3, "w", shape, whole(shape), std=0.5, dtype=torch.float32)
        with patch.object(numbers, "_CPU_CHUNK", chunk):
            part = counter_normal(3, "w", shape, box, std=0.5, dtype=torch.float32)
        assert part.shape == box.size
        assert torch.equal(part, full[box.slices])

    @pytest.mark.parametrize(
        "box",
        [Box((0, 100), (900, 37)), Box((13, 0), (801, 300)), Box((899, 1), (1, 299)), Box((0, 299), (900, 1))],
        ids=str,
    )
    def test_large_boxes_hold_the_numbers_of_the_whole(self, box: Box) -> None:
        shape = (900, 300)
        full = counter_normal(0, "w", shape, whole(shape), std=1.0, dtype=torch.float64)
        assert torch.equal(counter_normal(0, "w", shape, box, std=1.0, dtype=torch.float64), full[box.slices])

    def test_the_number_of_threads_changes_nothing(self) -> None:
        shape, threads = (1 << 18,), torch.get_num_threads()
        try:
            values = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                values.append(counter_normal(0, "w", shape, Box((5,), (200_001,)), std=1.0, dtype=torch.float32))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])

    def test_every_precision_is_a_rounding_of_the_fp32_numbers(self) -> None:
        shape = (50, 30)
        made = {
            dtype: counter_normal(1, "w", shape, whole(shape), std=0.02, dtype=dtype)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        }
        assert all(values.dtype == dtype for dtype, values in made.items())
        assert all(torch.equal(values, made[torch.float32].to(dtype)) for dtype, values in made.items())

    def test_numbers_depend_on_seed_and_name(self) -> None:
        streams = [(0, "a"), (1, "a"), (0, "b")]
        made = [counter_normal(*s, (64, 64), whole((64, 64)), std=1.0, dtype=torch.float32) for s in streams]
        for one, other in itertools.combinations(made, 2):
            assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 5 / 64

    def test_the_distribution_is_normal(self) -> None:
        shape = (1000, 500)
        values = counter_normal(0, "w", shape, whole(shape), std=2.0, dtype=torch.float64) / 2.0
        cells = (torch.special.ndtr(values) * 100).long().flatten().bincount(minlength=100)
        assert chi_square_excess(cells) < 5
        assert values.abs().max() > 4.0  # the tails exist
        assert values.isfinite().all()

    def test_neighbours_are_independent(self) -> None:
        shape = (700, 700)
        values = counter_normal(0, "w", shape, whole(shape), std=1.0, dtype=torch.float64)
        uniform = (torch.special.ndtr(values) * 8).long()
        for first, second in ((uniform[:, :-1], uniform[:, 1:]), (uniform[:-1], uniform[1:])):
            assert chi_square_excess((first * 8 + second).flatten().bincount(minlength=64)) < 5

    def test_std_scales_the_same_numbers(self) -> None:
        one, two = (counter_normal(0, "w", (99,), whole((99,)), std=std, dtype=torch.float32) for std in (1.0, 2.0))
        assert torch.equal(two, one * 2)

    def test_meta_and_fake_tensors_get_only_a_shape(self) -> None:
        shape = (1 << 20, 1 << 20)
        meta = counter_normal(0, "w", shape, whole(shape), std=1.0, dtype=torch.bfloat16, device="meta")
        with FakeTensorMode():
            fake = counter_normal(0, "w", shape, whole(shape), std=1.0, dtype=torch.bfloat16)
        assert meta.shape == fake.shape == shape
        assert meta.dtype == fake.dtype == torch.bfloat16


def mask(samples: list[int], start: int, length: int, feature: int, features: int, **changes: object) -> torch.Tensor:
    arguments: dict = {"seed": 1, "step": 2, "site": "blocks.0.mlp", "p": 0.3} | changes
    seed, step, site = (arguments.pop(key) for key in ("seed", "step", "site"))
    return dropout_mask(
        seed,
        step,
        torch.tensor(samples, dtype=torch.int64),
        site,
        start=start,
        length=length,
        features=features,
        feature_start=feature,
        **arguments,
    )


ranges = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted)


class TestDropoutMask:
    @given(st.lists(st.integers(0, 5), max_size=4), ranges, ranges, st.sampled_from([1, 16, 1 << 16]))
    def test_every_slice_is_a_slice_of_one_mask(
        self, samples: list[int], positions: list[int], features: list[int], chunk: int
    ) -> None:
        full = mask(list(range(6)), 0, 9, 0, 9)
        with patch.object(numbers, "_CPU_CHUNK", chunk):
            part = mask(samples, positions[0], positions[1] - positions[0], features[0], features[1] - features[0])
        assert torch.equal(part, full[samples, positions[0] : positions[1], features[0] : features[1]])

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_it_drops_with_probability_p(self, p: float) -> None:
        keep = mask([0, 1, 2, 3], 0, 300, 0, 200, p=p)
        error = math.sqrt(p * (1 - p) / keep.numel())
        assert abs(keep.double().mean().item() - (1 - p)) < 5 * error
        for dims in ((0, 1), (0, 2), (1, 2)):
            share = keep.double().mean(dims)
            assert (share - (1 - p)).abs().max() < 5 * error * math.sqrt(share.numel())

    def test_nothing_is_dropped_at_zero(self) -> None:
        assert mask([0, 1], 0, 64, 0, 64, p=0.0).all()

    @pytest.mark.parametrize(
        "changes",
        [{"seed": 9}, {"step": 3}, {"site": "blocks.1.mlp"}, {"samples": [8]}],
        ids=lambda change: next(iter(change)),
    )
    def test_other_seeds_steps_sites_and_samples_are_independent(self, changes: dict) -> None:
        samples = changes.pop("samples", [7])
        one, other = mask([7], 0, 300, 0, 300, p=0.5), mask(samples, 0, 300, 0, 300, p=0.5, **changes)
        assert abs((one == other).double().mean().item() - 0.5) < 5 * 0.5 / 300

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_neighbours_are_independent(self, dim: int) -> None:
        keep = mask(list(range(20)), 0, 70, 0, 70, p=0.5).movedim(dim, 0)
        same = (keep[1:] == keep[:-1]).double()
        assert abs(same.mean().item() - 0.5) < 5 * 0.5 / math.sqrt(same.numel())

    @pytest.mark.parametrize("p", [1.0, -0.1, 2.0])
    def test_an_invalid_probability_is_an_error(self, p: float) -> None:
        with pytest.raises(ConfigError, match=rf"dropout={p}: must be at least 0 and below 1"):
            mask([0], 0, 2, 0, 2, p=p)

    def test_fake_tensors_get_only_a_shape(self) -> None:
        with FakeTensorMode():
            keep = mask([0, 1], 0, 1 << 20, 0, 1 << 20)
        assert keep.shape == (2, 1 << 20, 1 << 20) and keep.dtype == torch.bool


def feistel(n: int, key: int) -> torch.Tensor:
    """The large-n algorithm at any n."""
    return numbers._feistel_walk(torch.arange(n), n, numbers._round_keys(key))


class TestPermutation:
    @given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
    def test_each_entry_comes_once(self, n: int, key: int) -> None:
        for order in (Permutation(n, key).many(torch.arange(n)), feistel(n, key)):
            assert torch.equal(order.sort().values, torch.arange(n))

    @pytest.mark.parametrize("n", [65_536, 65_537, 66_049, 100_003, 1 << 18])
    def test_each_entry_comes_once_around_and_above_the_table_limit(self, n: int) -> None:
        assert torch.equal(Permutation(n, 5).many(torch.arange(n)).sort().values, torch.arange(n))

    @settings(max_examples=30)
    @given(st.sampled_from([1, 1000, 65_536, 65_537, 10**12]), st.data())
    def test_random_access_gives_the_same_entry(self, n: int, data: st.DataObject) -> None:
        places = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
        order = Permutation(n, 11)
        many = order.many(torch.tensor(places, dtype=torch.int64))
        assert [order[place] for place in places] == many.tolist()
        assert all(0 <= entry < n for entry in many.tolist())
        array = order.many(np.array(places, dtype=np.int64))
        assert isinstance(array, np.ndarray) and array.tolist() == many.tolist()

    def test_a_large_permutation_has_no_table(self) -> None:
        order = Permutation(10**15, 3)
        assert len(pickle.dumps(order)) < 2000
        assert order.many(torch.arange(10_000)).unique().numel() == 10_000
        assert len(order) == 10**15

    def test_the_order_depends_on_the_key_alone(self) -> None:
        for n in (500, 70_000):
            places = torch.arange(500)
            orders = [Permutation(n, key).many(places) for key in (1, 1, 2)]
            assert torch.equal(orders[0], orders[1])
            assert (orders[0] == orders[2]).sum() < 10

    @pytest.mark.parametrize("n", [3, 70_000])
    def test_an_index_out_of_range_is_an_error(self, n: int) -> None:
        order = Permutation(n, 0)
        for place in (-1, n):
            with pytest.raises(IndexError, match=rf"index {place}: must lie in 0 … {n - 1}"):
                order[place]
        assert list(Permutation(3, 0)) == Permutation(3, 0).many(torch.arange(3)).tolist()

    def test_an_empty_permutation_is_an_error(self) -> None:
        with pytest.raises(ConfigError, match="n=0"):
            Permutation(0, 0)

    @pytest.mark.parametrize("make", [lambda n, key: Permutation(n, key).many(torch.arange(n)), feistel])
    def test_all_orders_of_few_entries_are_equally_likely(self, make) -> None:
        ranks = torch.zeros(24)
        rank = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
        for key in range(2400):
            ranks[rank[tuple(make(4, stream_key("trial", key)).tolist())]] += 1
        assert chi_square_excess(ranks) < 5

    @pytest.mark.parametrize("n", [65_537, 1_000_003])
    def test_a_large_permutation_does_not_correlate_with_the_index(self, n: int) -> None:
        cells = 40
        for key in range(4):
            places = torch.arange(n if n < 100_000 else 200_000)
            entries = Permutation(n, stream_key(key)).many(places)
            of_place, of_entry = places * cells // len(places), entries * cells // n
            gap = (entries[1:] - entries[:-1]) % n * cells // n
            pairs = of_entry[1:] * cells + of_entry[:-1]
            for cell in (of_place * cells + of_entry, pairs, gap):
                assert chi_square_excess(cell.bincount(minlength=cells if cell is gap else cells**2)) < 6

    def test_over_many_keys_an_entry_is_uniformly_distributed(self) -> None:
        n, places = 65_537, torch.tensor([0, 1, 255, 256, 65_536])
        entries = torch.stack([Permutation(n, stream_key("key", key)).many(places) for key in range(1000)])
        for column in entries.T:
            assert chi_square_excess((column * 20 // n).bincount(minlength=20)) < 5
        gaps = (entries[:, 1:] - entries[:, :-1]) % n
        for column in gaps.T:
            assert chi_square_excess((column * 20 // n).bincount(minlength=20)) < 5
