"""The bigram model against a count by hand."""

from collections import Counter
from itertools import chain, pairwise
from math import log

import numpy as np
import pytest

from megastack.data.baseline import LARGEST_VOCAB, bigram_loss, pair_counts
from megastack.data.packing import PackedSamples
from megastack.data.stream import stream_of

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


def test_counting_in_pieces_is_counting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pair_counts(samples(TRAIN), 4)
    monkeypatch.setattr("megastack.data.baseline._TOKENS_AT_A_TIME", 2)
    assert pair_counts(samples(TRAIN), 4).tolist() == whole.tolist()
    assert whole.sum() == len(pairs(TRAIN, True))


def test_a_large_vocabulary_and_nothing_to_score_have_no_baseline() -> None:
    assert bigram_loss(samples(TRAIN), samples(HELD), LARGEST_VOCAB + 1) is None
    assert bigram_loss(samples(TRAIN), samples([]), 4) is None
