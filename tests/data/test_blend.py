"""Blends: the rule that draws sources, changing weights, and the concatenated samples of all sources."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megastack.config.compose import compose
from megastack.config.phases import source_text
from megastack.data.blend import BlendOrder, shares
from megastack.data.blend_weights import PERIOD, WeightChange, check_weights, normalized
from megastack.data.dataset import ConcatDataset, Dataset, DatasetSpec, build_dataset
from megastack.data.order import SampleOrder
from megastack.errors import DataError
from megastack.random import stream_key
from tests.data.token_cases import write_by_hand

COUNTS = {"a": 50, "b": 1000, "c": 300_000}
A = {"a": 0.1, "b": 0.2, "c": 0.7}
B = {"a": 0.6, "b": 0.0, "c": 0.4}


def order(*changes: tuple[int, dict[str, float]]) -> BlendOrder:
    return BlendOrder(COUNTS, tuple(WeightChange(begin, weights) for begin, weights in changes), seed=5)


def test_every_source_has_its_share_at_every_point() -> None:
    sources, _ = order((0, A)).draws(np.arange(3 * PERIOD))
    for number, weight in enumerate(A.values()):
        drawn = np.cumsum(sources == number)
        assert np.abs(drawn - weight * np.arange(1, len(sources) + 1)).max() < 2.5


@pytest.mark.parametrize("changes", [[(0, A)], [(0, A), (1000, B)], [(0, A), (70_001, B), (140_000, A)]])
def test_no_draw_of_a_source_is_repeated_or_skipped(changes: list[tuple[int, dict[str, float]]]) -> None:
    sources, draws = order(*changes).draws(np.arange(200_000))
    for number in range(3):
        assert np.array_equal(draws[sources == number], np.arange((sources == number).sum()))


def test_a_change_of_weights_does_not_affect_earlier_entries() -> None:
    entries = np.arange(3000)
    before, after = order((0, A)).many(entries), order((0, A), (1000, B)).many(entries)
    assert np.array_equal(before[:1000], after[:1000]) and not np.array_equal(before[1000:], after[1000:])
    drawn = order((0, A), (1000, B)).draws(np.arange(1000, 3000))[0]
    assert not (drawn == 1).any() and abs((drawn == 0).sum() - 1200) < 3


def test_a_source_is_read_in_its_own_order() -> None:
    one = order((0, A))
    sources, _ = one.draws(np.arange(2000))
    own = SampleOrder(50, stream_key(5, "a")).many(np.arange((sources == 0).sum()))
    assert np.array_equal(one.many(np.arange(2000))[sources == 0], own)
    epoch = own[:50]
    assert sorted(epoch) == list(range(50))


def test_any_entry_can_be_computed_alone_and_far_away() -> None:
    one = order((0, A), (1000, B))
    entries = np.array([0, 999, 1000, 10**12, 10**12 + 1])
    assert [int(one.many(np.array([entry]))[0]) for entry in entries] == one.many(entries).tolist()


def test_every_weight_above_zero_has_a_share() -> None:
    assert shares([1, 1, 2]).tolist() == [PERIOD // 4, PERIOD // 4, PERIOD // 2]
    assert shares([1e-9, 1, 0]).tolist() == [1, PERIOD - 1, 0]
    assert shares([1, 1, 1]).sum() == PERIOD


EXTREME = {
    "sum beyond any number": ([1e308, 1e308, 1e308], [1 / 3] * 3),
    "sum of three": ([1e308, 0.5e308, 0.5e308], [0.5, 0.25, 0.25]),
    "denormal": ([5e-324, 1.5e-323], [0.25, 0.75]),
    "far apart": ([1e308, 5e-324, 1e308], [0.5, 1 / PERIOD, 0.5]),
    "far apart, one of weight 0": ([1.0, 1e-300, 0.0], [1.0, 1 / PERIOD, 0.0]),
    "a single one": ([1e308], [1.0]),
}


@pytest.mark.parametrize("name", EXTREME)
def test_weights_of_any_size_have_their_share(name: str) -> None:
    weights, expected = EXTREME[name]
    with np.errstate(all="raise"):
        counts = shares(weights)
    assert counts.sum() == PERIOD and all(
        (count > 0) == (weight > 0) for count, weight in zip(counts, weights, strict=True)
    )
    assert np.allclose(counts / PERIOD, expected, atol=2 / PERIOD)
    assert np.allclose(normalized(weights), expected, atol=2 / PERIOD)
    check_weights(weights, [1] * len(weights))


def test_shares_are_whole_and_positive_for_any_number_of_small_sources() -> None:
    counts = shares([2.9] * 20_000 + [0.188] * 40_000)
    assert counts.sum() == PERIOD and counts.min() == 1
    with pytest.raises(DataError, match=r"65,537 sources are drawn; use at most 65,536"):
        check_weights([1.0] * (PERIOD + 1), [1] * (PERIOD + 1))


def test_a_run_describes_the_shares_of_sources_with_huge_weights(tmp_path: Path) -> None:
    blend = [
        DatasetSpec("bin", [write_by_hand(tmp_path / name, [[at] * 100], 8)], 1e308) for at, name in enumerate("ab")
    ]
    text = build_dataset(blend=blend, sequence_length=8, vocab=8, validation_fraction=0).describe()
    assert text.count("(50.00% of the samples)") == 4
    config = compose(
        [
            "data.blend=[{paths: [a], weight: 1e308}, {paths: [b], weight: 1e308}]",
            "batch.sequence_length=8",
        ]
    )
    assert source_text(config) == "bin a 50.0% + bin b 50.0%"


def blended(tmp_path: Path, weights: tuple[float, float] = (1, 3), **options: Any) -> Dataset:
    for at, name in enumerate(("low", "high")):
        documents = [[50 * at + (n % 50)] * 9 for n in range(200)]
        write_by_hand(tmp_path / name, documents, 8 if at else 4)
    specs = [DatasetSpec("bin", [tmp_path / n], w) for n, w in zip(("low", "high"), weights, strict=True)]
    arguments = {"sequence_length": 4, "vocab": 100, "validation_fraction": 0.1, "blend": specs}
    return build_dataset(**(arguments | options))


def test_the_samples_of_a_blend_are_those_of_its_sources(tmp_path: Path) -> None:
    data = blended(tmp_path)
    assert isinstance(data.train, ConcatDataset)
    samples, parts = data.train.samples, [source.train.samples for source in data.sources]
    assert len(samples) == sum(map(len, parts))
    chosen = np.array([len(parts[0]) + 3, 0, len(parts[0]) - 1, len(parts[0])])
    rows = samples.rows(chosen)
    assert (rows.tokens_BS[:, 0] >= 50).tolist() == [True, False, False, True]
    assert np.array_equal(rows.tokens_BS[0], parts[1].rows(np.array([3])).tokens_BS[0])
    assert np.array_equal(samples.valid_tokens(chosen), (rows.labels_BS >= 0).sum(axis=1))
    drawn = samples.rows(data.order(0, data.history()).many(np.arange(400))).tokens_BS[:, 0] >= 50
    assert abs(drawn.sum() - 300) <= 2
    assert len(data.validation.samples) == sum(len(source.validation.samples) for source in data.sources)
    assert "75.00% of the samples" in data.describe()


def test_the_fingerprint_depends_on_sample_cutting_and_not_on_weights(tmp_path: Path) -> None:
    prints = [blended(tmp_path, **change).fingerprint for change in ({}, {"weights": (1, 1)}, {"sequence_length": 5})]
    assert prints[0] == prints[1] != prints[2]
    assert blended(tmp_path, validation_fraction=0.2).fingerprint != prints[0]


def test_kinds_of_sources_can_be_mixed(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "c", [[200] * 30] * 40, 8)
    data = build_dataset(
        blend=[DatasetSpec("builtin", (), 1), DatasetSpec("bin", [tmp_path / "c"], 1)], sequence_length=16, vocab=256
    )
    rows = data.train.samples.rows(data.order(0, data.history()).many(np.arange(100)))
    assert 48 <= (rows.tokens_BS == 200).all(axis=1).sum() <= 52


def test_a_source_named_twice_or_without_a_sample_is_rejected(tmp_path: Path) -> None:
    blended(tmp_path)
    twice = [DatasetSpec("bin", [tmp_path / "low"], 1), DatasetSpec("bin", [tmp_path / "low.bin"], 2)]
    with pytest.raises(DataError, match="name each source once"):
        blended(tmp_path, blend=twice)
    with pytest.raises(DataError, match="too few for one sample"):
        blended(tmp_path, sequence_length=10_000)
