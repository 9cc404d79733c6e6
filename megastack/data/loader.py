"""Microbatches for a step: which samples this data-parallel coordinate reads, as tensors.

Step s consumes the entries [s·N_b, (s+1)·N_b) of the endless order (:mod:`megastack.data.order`), N_b the global batch.
Microbatch m of data-parallel rank r takes the b entries from s·N_b + (m·d + r)·b on. So the samples of a step are the
same set for every layout, and everything is a function of the step number: the loader has no position to save.

It does not read ahead in threads: rows are cut from arrays in memory at a small fraction of a step's cost. What it can
say ahead of a step, at no cost worth mentioning, is how many labels of it are valid.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from megastack.batch import IGNORED_LABEL, Microbatch
from megastack.data.order import Order, SampleOrder
from megastack.data.packing import Rows, Samples, check_rows
from megastack.errors import ConfigError, DataError

Int64s = npt.NDArray[np.int64]


class Loader:
    """The training microbatches of one data-parallel coordinate; stages and tensor-parallel ranks read the same.

    Args:
        samples: what to draw from.
        global_size: samples in a step, over all data-parallel ranks and microbatches.
        micro_size: rows of a microbatch.
        dp_rank, dp_size: this coordinate and how many there are.
        seed: decides the order.
        vocab: ids must be below it (`model.vocab`).
        order: the order itself, where it is not the seed's over all samples alike.

    Raises :class:`DataError`, on every rank alike, for no samples and for an id outside the vocabulary.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        global_size: int,
        micro_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        vocab: int,
        order: Order | None = None,
    ) -> None:
        _check_sizes(global_size, micro_size, dp_size)
        if not len(samples):
            raise DataError("the training split has no samples; use more text or a smaller batch.sequence_length")
        samples.check_ids(vocab)
        self.microbatches = global_size // (micro_size * dp_size)
        self._samples = samples
        self.order: Order = order or SampleOrder(len(samples), seed)
        self._global_size, self._micro_size = global_size, micro_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._vocab = vocab

    def step(self, step: int) -> list[Microbatch]:
        """The microbatches of 0-based `step`, in the order of the schedule, on the CPU."""
        entries = self.entries(step)
        numbers = self.order.many(entries)
        rows = self._samples.rows(numbers)
        check_rows(rows, self._vocab, numbers)
        return microbatches(rows, entries, self._micro_size, step)

    def entries(self, step: int) -> Int64s:
        """The entries of the endless stream that this coordinate consumes in `step`, microbatch after microbatch."""
        grid = step * self._global_size + np.arange(self._global_size, dtype=np.int64)
        return grid.reshape(self.microbatches, self._dp_size, self._micro_size)[:, self._dp_rank].reshape(-1)

    def sample_numbers(self, step: int) -> Int64s:
        """The samples behind :meth:`entries`."""
        return self.order.many(self.entries(step))

    def valid_tokens(self, step: int) -> int:
        """Labels that this coordinate will predict in `step`; cheap, for any step, before or after it."""
        return int(self._samples.valid_tokens(self.sample_numbers(step)).sum())

    def global_valid_tokens(self, step: int) -> int:
        """Labels that all coordinates together will predict in `step`: the same on every rank, no communication."""
        entries = step * self._global_size + np.arange(self._global_size, dtype=np.int64)
        return int(self._samples.valid_tokens(self.order.many(entries)).sum())


def microbatches(rows: Rows, numbers: Int64s, micro_size: int, step: int) -> list[Microbatch]:
    """`rows` as microbatches of `micro_size` rows each; `numbers` are the rows' global sample numbers."""
    valid = (rows.labels_BS != IGNORED_LABEL).reshape(-1, micro_size * rows.labels_BS.shape[1]).sum(axis=1)
    tokens, labels, positions, samples = (
        torch.from_numpy(array).split(micro_size)
        for array in (rows.tokens_BS, rows.labels_BS, rows.positions_BS, numbers)
    )
    documents = None if rows.documents_BS is None else torch.from_numpy(rows.documents_BS).split(micro_size)
    return [
        Microbatch(
            tokens_BS=tokens[m],
            labels_BS=labels[m],
            positions_BS=positions[m],
            documents_BS=None if documents is None else documents[m],
            samples_B=samples[m],
            step=step,
            valid_tokens=int(valid[m]),
        )
        for m in range(len(tokens))
    ]


def _check_sizes(global_size: int, micro_size: int, dp_size: int) -> None:
    unit = micro_size * dp_size
    if global_size % unit or global_size < unit:
        near = max(unit, global_size // unit * unit)
        raise ConfigError(
            f"batch.global_size={global_size}: must be a multiple of batch.micro_size={micro_size} x "
            f"parallel.dp={dp_size}; use for example {near}"
        )
