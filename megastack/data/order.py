"""The order of the samples: an infinite stream with random access to every entry.

Entry j of the stream is entry j mod N of the permutation for epoch j div N. A permutation is a function of (seed,
epoch), evaluated only at the requested entries. The order is therefore the same on every layout, a resume needs only
the step number, and no rank holds state. The order permutes sample numbers and is independent of the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastack.random import Permutation, stream_key

Int64s = npt.NDArray[np.int64]


class Order(Protocol):
    """An infinite stream of sample numbers with random access."""

    def many(self, entries: Int64s) -> Int64s:
        """The sample at each of these entries."""


@dataclass(frozen=True)
class Cursor:
    """The position of a run in a source: it has made `draws` draws in the order that `seed` determines."""

    seed: int
    draws: int = 0


class SampleOrder:
    """The infinite order over `count` samples that `seed` determines.

    Entry 0 of this order is entry `skip` of the seed's order; `skip` may be negative.
    """

    def __init__(self, count: int, seed: int, skip: int = 0) -> None:
        assert count > 0, "an order needs at least one sample"
        self._count = count
        self._seed = seed
        self._skip = skip
        self._recent: dict[int, Permutation] = {}

    def many(self, entries: Int64s) -> Int64s:
        """The sample at each of these entries (any int64 numbers >= 0, any shape)."""
        epochs, indices = np.divmod(np.asarray(entries, dtype=np.int64) + self._skip, self._count)
        samples = np.empty_like(indices)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            samples[chosen] = self._permutation(int(epoch)).many(indices[chosen])
        return samples

    def __getitem__(self, entry: int) -> int:
        return int(self.many(np.array([entry]))[0])

    def _permutation(self, epoch: int) -> Permutation:
        if epoch not in self._recent:
            if len(self._recent) >= 2:  # a step rarely spans more than two epochs; tiny datasets rebuild permutations
                self._recent.pop(min(self._recent))
            self._recent[epoch] = Permutation(self._count, stream_key(self._seed, "data order", epoch))
        return self._recent[epoch]
