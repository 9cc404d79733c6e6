"""Every validation sample once on any number of ranks, the mean over its tokens, and the bigram baseline."""

from collections import Counter
from itertools import chain, pairwise
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.batch import IGNORED_LABEL
from megastack.data.packing import PackedSamples, SingleSamples
from megastack.data.stream import stream_of
from megastack.data.validation import MAX_BASELINE_VOCAB, ValidationBatches, bigram_loss, evenly_spread, pair_counts

SIZE, VOCAB = 3, 100


def singles(count: int) -> SingleSamples:
    """Sample i is a document of the tokens i+1, i+1, so its only label is i+1."""
    return SingleSamples(stream_of([np.full(2, i + 1) for i in range(count)], VOCAB), SIZE)


def batches(samples: PackedSamples | SingleSamples, rank: int = 0, ranks: int = 1, **options: int) -> ValidationBatches:
    sizes = {"microbatches": 1, "micro_size": 1, "vocab": VOCAB, **options}
    return ValidationBatches(samples, dp_rank=rank, dp_size=ranks, **sizes)


def labels_of(one: ValidationBatches) -> list[int]:
    labels = [batch.labels_BS for group in one for batch in group]
    return [label for rows in labels for label in rows[rows != IGNORED_LABEL].tolist()]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 5), st.integers(1, 3))
def test_each_sample_is_evaluated_once_and_all_ranks_run_equally_long(
    count: int, ranks: int, rows: int, m: int
) -> None:
    parts = [batches(singles(count), rank, ranks, micro_size=rows, microbatches=m) for rank in range(ranks)]
    assert sorted([label for part in parts for label in labels_of(part)]) == list(range(1, count + 1))
    shapes = [[[tuple(batch.tokens_BS.shape) for batch in group] for group in part] for part in parts]
    assert all(shape == [[(rows, SIZE)] * m] * len(parts[0]) for shape in shapes)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (4, 5), (16, 1)])
def test_the_mean_over_nine_samples_is_not_biased_by_padding(ranks: int, rows: int) -> None:
    """The losses 1 to 9 have the mean 5.0: on two ranks, in a short last batch, on more ranks than samples."""
    parts = [batches(singles(9), rank, ranks, micro_size=rows) for rank in range(ranks)]
    losses = [label for part in parts for label in labels_of(part)]
    assert sum(losses) / parts[0].valid_tokens == 5.0
    assert all(part.samples == 9 and part.valid_tokens == 9 for part in parts)
    assert sum(batch.valid_tokens for part in parts for group in part for batch in group) == 9


def test_documents_of_packed_samples_survive_the_padding() -> None:
    samples = PackedSamples(stream_of([np.arange(4), np.arange(7)], VOCAB), SIZE)
    (group,) = batches(samples, microbatches=2, micro_size=2)
    assert [batch.documents_BS is not None for batch in group] == [True, True]
    assert group[0].positions_BS.tolist() == [[0, 1, 2], [0, 0, 1]]
    assert group[1].valid_tokens == 3


def test_a_limit_takes_samples_spread_over_the_whole_split() -> None:
    assert labels_of(batches(singles(9), limit=3)) == [1, 4, 7]
    assert batches(singles(9), limit=3).samples == 3
    assert batches(singles(9), limit=50).samples == 9


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 50), st.integers(0, 60))
def test_spread_numbers_are_distinct_and_within(count: int, limit: int) -> None:
    chosen = evenly_spread(count, limit).tolist()
    assert len(chosen) == len(set(chosen)) == min(count, limit)
    assert all(0 <= number < count for number in chosen)


def test_samples_without_any_label_make_batches_of_no_token() -> None:
    found = batches(PackedSamples(stream_of([np.array([1])] * 28, VOCAB), SIZE))
    assert (found.samples, found.valid_tokens) == (9, 0)
    assert all(microbatch.valid_tokens == 0 for batch in found for microbatch in batch)


def test_no_validation_samples_make_no_batches() -> None:
    assert list(batches(PackedSamples(stream_of([], VOCAB), SIZE))) == []


TRAIN = [[0, 1, 0, 1, 2], [2, 0, 1], [1]]
HELD = [[0, 1, 2], [2, 1, 0]]


def samples(documents: list[list[int]], size: int = 1, mask: bool = True) -> PackedSamples:
    return PackedSamples(stream_of([np.array(d) for d in documents], 4), size, document_mask=mask)


def pairs(documents: list[list[int]], mask: bool) -> list[tuple[int, int]]:
    joined = documents if mask else [list(chain(*documents))]
    return [pair for document in joined for pair in pairwise(document)]


@pytest.mark.parametrize("mask", [True, False])
def test_pairs_are_counted_smoothed_and_scored_within_documents(mask: bool) -> None:
    seen = Counter(pairs(TRAIN, mask))
    first = Counter(a for a, _ in pairs(TRAIN, mask))
    scored = [-log((seen[a, b] + 0.1) / (first[a] + 0.1 * 4)) for a, b in pairs(HELD, mask)]
    loss = bigram_loss(samples(TRAIN, mask=mask), samples(HELD, mask=mask), 4)
    assert loss == pytest.approx(sum(scored) / len(scored), rel=1e-12)


def test_only_the_chosen_validation_samples_are_scored() -> None:
    held = samples(HELD, mask=False)
    whole, *parts = (bigram_loss(samples(TRAIN), held, 4, chosen=c) for c in [None, *np.arange(len(held))[:, None]])
    assert whole == pytest.approx(sum(part or 0 for part in parts) / len(held))
    assert len(set(parts)) > 1


def test_counting_in_pieces_equals_counting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pair_counts(samples(TRAIN), 4)
    monkeypatch.setattr("megastack.data.validation._TOKENS_AT_A_TIME", 2)
    assert pair_counts(samples(TRAIN), 4).tolist() == whole.tolist()
    assert whole.sum() == len(pairs(TRAIN, True))


def test_a_large_vocabulary_and_nothing_to_score_have_no_baseline() -> None:
    assert bigram_loss(samples(TRAIN), samples(HELD), MAX_BASELINE_VOCAB + 1) is None
    assert bigram_loss(samples(TRAIN), samples([]), 4) is None
