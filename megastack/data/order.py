"""The order of the samples: an endless stream whose every entry can be named without walking to it.

Entry j of the stream is entry j mod N of the permutation that belongs to epoch j div N. A permutation is a function of
(seed, epoch) and is evaluated where it is asked, so the order is the same for every layout, a resume needs the step
number and nothing else, and no rank holds state. It shuffles numbers, and knows nothing of what they stand for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastack.random import Permutation, stream_key

Int64s = npt.NDArray[np.int64]


class Order(Protocol):
    """An endless stream of sample numbers with random access."""

    def many(self, entries: Int64s) -> Int64s:
        """The sample at each of these entries."""


@dataclass(frozen=True)
class Cursor:
    """How far the samples of a source were drawn: `draws` of them, in the order that belongs to `seed`."""

    seed: int
    draws: int = 0


class SampleOrder:
    """The endless order over `count` samples that belongs to `seed`; it may begin `skip` entries later (or earlier)."""

    def __init__(self, count: int, seed: int, skip: int = 0) -> None:
        assert count > 0, "an order needs at least one sample"
        self._count = count
        self._seed = seed
        self._skip = skip
        self._recent: dict[int, Permutation] = {}

    def many(self, entries: Int64s) -> Int64s:
        """The sample at each of these entries (any int64 numbers >= 0, any shape) of the endless stream."""
        epochs, places = np.divmod(np.asarray(entries, dtype=np.int64) + self._skip, self._count)
        samples = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            samples[chosen] = self._permutation(int(epoch)).many(places[chosen])
        return samples

    def __getitem__(self, entry: int) -> int:
        return int(self.many(np.array([entry]))[0])

    def _permutation(self, epoch: int) -> Permutation:
        if epoch not in self._recent:
            if len(self._recent) >= 2:  # a step seldom spans more than two epochs; a small one is built again
                self._recent.pop(min(self._recent))
            self._recent[epoch] = Permutation(self._count, stream_key(self._seed, "data order", epoch))
        return self._recent[epoch]
