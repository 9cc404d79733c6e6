"""The microbatches of a step: the samples that this data-parallel rank reads, as tensors.

Step s consumes the entries [s·N, (s+1)·N) of the infinite order (:mod:`megastack.data.order`), where N is the global
batch size. Microbatch m of data-parallel rank r of d consists of the b entries from s·N + (m·d + r)·b on. The samples
of a step are therefore the same set on every layout. Everything is a function of the step number, so the loader has no
position to save.

There are no read-ahead threads: cutting rows from arrays in memory costs a small fraction of a step. The number of
valid labels of any step is available without reading it, at negligible cost.
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
    """The training microbatches of one data-parallel rank; its pipeline and tensor-parallel ranks read the same ones.

    Args:
        samples: the training samples.
        global_size: samples in a step, over all data-parallel ranks and microbatches.
        micro_size: rows of a microbatch.
        dp_rank, dp_size: the index of this rank on the data-parallel axis, and the size of the axis.
        seed: determines the order.
        vocab: ids must be below it (`model.vocab`).
        order: replaces the order over all samples that `seed` determines.

    Raises:
        DataError: on every rank, if there are no samples or an id is outside the vocabulary.
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
        """The entries of the infinite stream that this rank consumes in `step`, microbatch after microbatch."""
        grid = step * self._global_size + np.arange(self._global_size, dtype=np.int64)
        return grid.reshape(self.microbatches, self._dp_size, self._micro_size)[:, self._dp_rank].reshape(-1)

    def sample_numbers(self, step: int) -> Int64s:
        """The samples at :meth:`entries`."""
        return self.order.many(self.entries(step))

    def valid_tokens(self, step: int) -> int:
        """The number of labels that this rank predicts in `step`; cheap, for any step."""
        return int(self._samples.valid_tokens(self.sample_numbers(step)).sum())

    def global_valid_tokens(self, step: int) -> int:
        """The number of labels that all data-parallel ranks predict in `step`; needs no communication."""
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
    multiple = micro_size * dp_size
    if global_size % multiple or global_size < multiple:
        near = max(multiple, global_size // multiple * multiple)
        raise ConfigError(
            f"batch.global_size={global_size}: must be a multiple of batch.micro_size={micro_size} x "
            f"parallel.dp={dp_size}; use for example {near}"
        )
