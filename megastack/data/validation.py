"""Every validation sample once, over the data-parallel ranks, however unevenly they divide.

Ranks must run equally many microbatches of equal shape, or a pipeline hangs. So the last ones are filled with rows
whose every label is ignored: they cost time and change neither the sum of losses nor the count of tokens. The loss of
a validation is the sum over all its tokens divided by their number, so a short last batch weighs what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megastack.batch import Microbatch
from megastack.data.loader import microbatches
from megastack.data.packing import Samples, check_rows, padded

Int64s = npt.NDArray[np.int64]


class ValidationBatches:
    """The validation microbatches of one data-parallel coordinate, in batches of `microbatches` each.

    Args:
        samples: the validation split.
        microbatches: microbatches in a batch, what one run of the schedule takes.
        micro_size: rows of a microbatch.
        dp_rank, dp_size: this coordinate and how many there are.
        vocab: ids must be below it (`model.vocab`).
        limit: samples to use, spread evenly over the split; None or more than there are: all.

    Raises :class:`DataError`, on every rank, for an id outside the vocabulary.
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
        self._set = samples
        self.chosen = evenly_spread(len(samples), limit)
        self._microbatches, self._micro_size = microbatches, micro_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._vocab = vocab

    @property
    def samples(self) -> int:
        """Samples that a validation covers, over all ranks; padding is none."""
        return len(self.chosen)

    @property
    def valid_tokens(self) -> int:
        """Labels that a validation predicts, over all ranks: what its summed loss is divided by, unless it is 0."""
        return int(self._set.valid_tokens(self.chosen).sum())

    def __len__(self) -> int:
        """Batches, the same number on every rank."""
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
        rows = self._set.rows(self.chosen[present])
        check_rows(rows, self._vocab, self.chosen[present])
        return microbatches(padded(rows, len(numbers)), numbers, self._micro_size, step=batch)


def evenly_spread(count: int, limit: int | None) -> Int64s:
    """`limit` of the numbers below `count`, ascending and evenly spread; all of them without a smaller limit."""
    if limit is None or limit >= count:
        return np.arange(count, dtype=np.int64)
    return np.arange(limit, dtype=np.int64) * count // limit
