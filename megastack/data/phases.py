"""A run whose data or sequence length change at some steps: one endless stream made of stages.

The samples of a step are those of the stage that the step is in; entries of the stream are numbered through, so that
dropout and everything else that goes by the number of a sample never meets a number twice. Within a stage each sample
has its turn once an epoch. A source that an earlier stage drew from at the same sequence length goes on where it was,
in the order it had; at another length it is cut anew and begins anew. All of this follows from the stages and their
steps: there is no position to save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megastack.batch import Microbatch
from megastack.data.blend import BlendOrder, History
from megastack.data.dataset import Dataset
from megastack.data.loader import Loader
from megastack.data.order import Cursor, Order

Int64s = npt.NDArray[np.int64]

BlendHistories = tuple[History, ...]
"""The weights of each stage, in order; empty for one that is no blend."""


def fresh_histories(dataset: Dataset, global_size: int) -> BlendHistories:
    """The weights of a run that has not changed any."""
    return tuple(stage.data.history(entry=stage.from_step * global_size) for stage in dataset.stages)


def phase_orders(dataset: Dataset, seed: int, histories: BlendHistories, global_size: int) -> list[Order]:
    """The order of each stage, by the entries of the whole run's stream."""
    begins = [stage.from_step * global_size for stage in dataset.stages]
    if not dataset.later:
        return [dataset.order(seed, histories[0])]
    taken: dict[tuple[str, int], Cursor] = {}
    orders = []
    for stage, history, begin, end in zip(dataset.stages, histories, begins, [*begins[1:], None], strict=True):
        length = stage.data.train.samples.sequence_length
        digests = [source.digest for source in stage.data.sources]
        before = {digest: taken[digest, length] for digest in digests if (digest, length) in taken}
        order = stage.data.order(seed, history, begin=begin, taken=before)
        orders.append(order)
        if end is not None:
            after = _after(order, digests, before, seed, begin, end)
            taken |= {(digest, length): each for digest, each in after.items()}
    return orders


def _after(
    order: Order, digests: Sequence[str], before: dict[str, Cursor], seed: int, begin: int, end: int
) -> dict[str, Cursor]:
    """How far the sources of a stage are drawn at its end."""
    if isinstance(order, BlendOrder):
        return order.taken(end)
    (digest,) = digests
    start = before.get(digest, Cursor(seed))
    return {digest: Cursor(start.seed, start.draws + end - begin)}


class PhasedLoader:
    """The microbatches of whichever stage a step is in; asked like one :class:`megastack.data.loader.Loader`.

    Args:
        begins: the 0-based step at which each stage begins, ascending from 0.
        parts: a loader for each stage, by the steps of the whole run, with equally many microbatches.
    """

    def __init__(self, begins: Sequence[int], parts: Sequence[Loader]) -> None:
        assert begins[0] == 0 and len(begins) == len(parts)
        self.parts = list(parts)
        self.microbatches = parts[0].microbatches
        self._begins = np.array(begins, dtype=np.int64)

    def at(self, step: int) -> Loader:
        """The loader of the stage that the 0-based `step` is in."""
        return self.parts[int(self._begins.searchsorted(step, "right")) - 1]

    def step(self, step: int) -> list[Microbatch]:
        """As :meth:`Loader.step`."""
        return self.at(step).step(step)

    def entries(self, step: int) -> Int64s:
        """As :meth:`Loader.entries`."""
        return self.at(step).entries(step)

    def sample_numbers(self, step: int) -> Int64s:
        """As :meth:`Loader.sample_numbers`, by the numbers of the stage's own samples."""
        return self.at(step).sample_numbers(step)

    def valid_tokens(self, step: int) -> int:
        """As :meth:`Loader.valid_tokens`."""
        return self.at(step).valid_tokens(step)

    def global_valid_tokens(self, step: int) -> int:
        """As :meth:`Loader.global_valid_tokens`."""
        return self.at(step).global_valid_tokens(step)
