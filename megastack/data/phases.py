"""Data phases: a run whose data or sequence length changes at given steps, as one infinite sample stream.

A step reads the samples of its phase. Entries of the stream are numbered across phases, so that dropout and everything
else that is keyed by the sample number never sees a number twice. Within a phase each sample is drawn once per epoch. A
source that an earlier phase drew from at the same sequence length continues at its position, in the same order; at
another length it is cut into new samples and starts over. All of this follows from the phases and their steps, so there
is no position to save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megastack.batch import Microbatch
from megastack.data.blend import BlendOrder
from megastack.data.blend_weights import History
from megastack.data.dataset import Dataset
from megastack.data.loader import Loader
from megastack.data.order import Cursor, Order

Int64s = npt.NDArray[np.int64]

BlendHistories = tuple[History, ...]
"""The blend history of each phase, in order; empty for a phase without a blend."""


def initial_histories(dataset: Dataset, global_size: int) -> BlendHistories:
    """The blend histories of a new run."""
    return tuple(phase.data.history(entry=phase.from_step * global_size) for phase in dataset.phases)


def phase_orders(dataset: Dataset, seed: int, histories: BlendHistories, global_size: int) -> list[Order]:
    """The sample order of each phase, indexed by the entries of the whole run's stream."""
    begins = [phase.from_step * global_size for phase in dataset.phases]
    if not dataset.later_phases:
        return [dataset.order(seed, histories[0])]
    cursors: dict[tuple[str, int], Cursor] = {}
    orders = []
    for phase, history, begin, end in zip(dataset.phases, histories, begins, [*begins[1:], None], strict=True):
        length = phase.data.train.samples.sequence_length
        digests = [source.digest for source in phase.data.sources]
        before = {digest: cursors[digest, length] for digest in digests if (digest, length) in cursors}
        order = phase.data.order(seed, history, begin=begin, cursors=before)
        orders.append(order)
        if end is not None:
            after = _cursors_at_end(order, digests, before, seed, begin, end)
            cursors |= {(digest, length): each for digest, each in after.items()}
    return orders


def _cursors_at_end(
    order: Order, digests: Sequence[str], before: dict[str, Cursor], seed: int, begin: int, end: int
) -> dict[str, Cursor]:
    """The positions of a phase's sources when the phase ends."""
    if isinstance(order, BlendOrder):
        return order.cursors(end)
    (digest,) = digests
    start = before.get(digest, Cursor(seed))
    return {digest: Cursor(start.seed, start.draws + end - begin)}


class PhasedLoader:
    """The microbatches of the phase that a step belongs to; same interface as :class:`megastack.data.loader.Loader`.

    Args:
        begins: the 0-based step at which each phase begins, ascending from 0.
        loaders: the loader of each phase, called with steps of the whole run; all have the same number of microbatches.
    """

    def __init__(self, begins: Sequence[int], loaders: Sequence[Loader]) -> None:
        assert begins[0] == 0 and len(begins) == len(loaders)
        self.loaders = list(loaders)
        self.microbatches = loaders[0].microbatches
        self._begins = np.array(begins, dtype=np.int64)

    def at(self, step: int) -> Loader:
        """The loader of the phase of the 0-based `step`."""
        return self.loaders[int(self._begins.searchsorted(step, "right")) - 1]

    def step(self, step: int) -> list[Microbatch]:
        """See :meth:`Loader.step`."""
        return self.at(step).step(step)

    def entries(self, step: int) -> Int64s:
        """See :meth:`Loader.entries`."""
        return self.at(step).entries(step)

    def sample_numbers(self, step: int) -> Int64s:
        """See :meth:`Loader.sample_numbers`; samples are numbered within the phase."""
        return self.at(step).sample_numbers(step)

    def valid_tokens(self, step: int) -> int:
        """See :meth:`Loader.valid_tokens`."""
        return self.at(step).valid_tokens(step)

    def global_valid_tokens(self, step: int) -> int:
        """See :meth:`Loader.global_valid_tokens`."""
        return self.at(step).global_valid_tokens(step)
