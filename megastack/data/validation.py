"""Validation: every sample once over the data-parallel ranks, and a bigram baseline that a model should beat.

All ranks must run the same number of microbatches of the same shape, or a pipeline hangs. The last microbatches are
therefore padded with rows of ignored labels, which take time but change neither the sum of losses nor the token count.
The validation loss is the sum over all tokens divided by their number, so a short last batch has its exact weight.

The baseline is a bigram model, counted on the training split and scored on the validation labels: p(b | a) = (n(a, b) +
0.1) / (n(a) + 0.1·V). Pairs come from the labels of the samples, so that counting and scoring honour document
boundaries exactly as training does. The table is V×V and is computed for small vocabularies only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megastack.batch import IGNORED_LABEL, Microbatch
from megastack.data.loader import microbatches
from megastack.data.packing import Samples, check_rows, padded

Int64s = npt.NDArray[np.int64]

SMOOTHING = 0.1
MAX_BASELINE_VOCAB = 1024
"""The largest vocabulary for which the baseline is computed."""

MAX_BASELINE_TOKENS = 1 << 27
"""The most training tokens for which the baseline is computed."""

_TOKENS_AT_A_TIME = 1 << 20


class ValidationBatches:
    """The validation microbatches of one data-parallel rank, in batches of `microbatches` each.

    Args:
        samples: the validation split.
        microbatches: microbatches in a batch, which is one run of the schedule.
        micro_size: rows of a microbatch.
        dp_rank, dp_size: the index of this rank on the data-parallel axis, and the size of the axis.
        vocab: ids must be below it (`model.vocab`).
        limit: samples to use, spread evenly over the split; None uses all.

    Raises:
        DataError: on every rank, if an id is outside the vocabulary.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        microbatches: int,
        micro_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        vocab: int,
        limit: int | None = None,
    ) -> None:
        samples.check_ids(vocab)
        self._samples = samples
        self.chosen = evenly_spread(len(samples), limit)
        self._microbatches, self._micro_size = microbatches, micro_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._vocab = vocab

    @property
    def samples(self) -> int:
        """Samples that a validation covers, over all ranks and without padding."""
        return len(self.chosen)

    @property
    def valid_tokens(self) -> int:
        """Labels that a validation predicts, over all ranks: the divisor of the summed loss, unless it is 0."""
        return int(self._samples.valid_tokens(self.chosen).sum())

    def __len__(self) -> int:
        """The number of batches, the same on every rank."""
        return -(-len(self.chosen) // (self._microbatches * self._dp_size * self._micro_size))

    def __iter__(self) -> Iterator[list[Microbatch]]:
        for batch in range(len(self)):
            yield self._batch(batch)

    def _batch(self, batch: int) -> list[Microbatch]:
        shape = (self._microbatches, self._dp_size, self._micro_size)
        size = int(np.prod(shape))
        grid = batch * size + np.arange(size, dtype=np.int64)
        numbers = grid.reshape(shape)[:, self._dp_rank].reshape(-1)
        present = numbers[numbers < len(self.chosen)]
        rows = self._samples.rows(self.chosen[present])
        check_rows(rows, self._vocab, self.chosen[present])
        return microbatches(padded(rows, len(numbers)), numbers, self._micro_size, step=batch)


def evenly_spread(count: int, limit: int | None) -> Int64s:
    """`limit` of the numbers below `count`, ascending and evenly spread; all of them if the limit is not smaller."""
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    return np.arange(limit, dtype=np.int64) * count // limit


def bigram_loss(train: Samples, validation: Samples, vocab: int, *, chosen: Int64s | None = None) -> float | None:
    """Nats per valid token of the bigram model on `validation` (on its samples `chosen`, or on all of them).

    Args:
        vocab: the tokenizer's size, not the model's padded vocabulary.

    Returns:
        None beyond :data:`MAX_BASELINE_VOCAB` or :data:`MAX_BASELINE_TOKENS`, or if there is nothing to score.
    """
    if vocab > MAX_BASELINE_VOCAB or len(train) * train.sequence_length > MAX_BASELINE_TOKENS:
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
