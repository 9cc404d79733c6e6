"""What a model must beat: a bigram model counted on the training split and scored on the validation labels.

p(b | a) = (n(a, b) + 0.1) / (n(a) + 0.1·V). Pairs are taken from the labels of the samples, so both counting and
scoring honour document boundaries exactly as training does. The table is V×V, so it is offered for small vocabularies.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megastack.batch import IGNORED_LABEL
from megastack.data.packing import Samples

Int64s = npt.NDArray[np.int64]

SMOOTHING = 0.1
LARGEST_VOCAB = 1024
"""The largest vocabulary for which a baseline is computed."""

MOST_TOKENS = 1 << 27
"""The most training tokens that are counted for one."""

_TOKENS_AT_A_TIME = 1 << 20


def bigram_loss(train: Samples, validation: Samples, vocab: int, *, chosen: Int64s | None = None) -> float | None:
    """Nats per valid token of the bigram model on `validation` (its samples `chosen`, or all of them).

    Args:
        vocab: the tokenizer's size, not the model's padded vocabulary.

    None, for no baseline, beyond :data:`LARGEST_VOCAB` or :data:`MOST_TOKENS`, or with nothing to score.
    """
    if vocab > LARGEST_VOCAB or len(train) * train.sequence_length > MOST_TOKENS:
        return None
    scored = pair_counts(validation, vocab, chosen)
    if not scored.sum():
        return None
    counts = pair_counts(train, vocab) + SMOOTHING
    log_p = np.log(counts) - np.log(counts.sum(axis=1, keepdims=True))
    return float(-(scored * log_p).sum() / scored.sum())


def pair_counts(samples: Samples, vocab: int, chosen: Int64s | None = None) -> Int64s:
    """(vocab, vocab): how often each token is followed by each label in these samples."""
    counts = np.zeros(vocab * vocab, dtype=np.int64)
    for tokens, labels in _pairs(samples, np.arange(len(samples), dtype=np.int64) if chosen is None else chosen):
        counts += np.bincount(tokens * vocab + labels, minlength=vocab * vocab)
    return counts.reshape(vocab, vocab)


def _pairs(samples: Samples, chosen: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    rows_at_a_time = max(1, _TOKENS_AT_A_TIME // samples.sequence_length)
    for begin in range(0, len(chosen), rows_at_a_time):
        rows = samples.rows(chosen[begin : begin + rows_at_a_time])
        valid = rows.labels_BS != IGNORED_LABEL
        yield rows.tokens_BS[valid], rows.labels_BS[valid]
