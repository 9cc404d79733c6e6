"""Fixed-length samples cut from a token stream, with labels, positions and document numbers.

Packed (the default): sample i holds the tokens [i·S, i·S + S] of the stream, S inputs and the same tokens shifted by
one as labels. Documents continue from sample to sample. With document masks, a row restarts its positions and
increments a document number wherever a document begins. The label after the last token of a document is ignored:
predicting the end id is meaningful, predicting the start of an unrelated document is not. Not packed: every sample is
one document, and a longer document is cut into several samples.

Everything is vectorised over the requested rows; nothing is precomputed per sample of a packed stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastack.batch import IGNORED_LABEL
from megastack.data.stream import Stream, TokenStream
from megastack.errors import DataError

Int64s = npt.NDArray[np.int64]

PADDING_ID = 0
"""The token that pads a row; its label is ignored, and causal attention hides it from the tokens before it."""


@dataclass(frozen=True)
class Rows:
    """Samples as int64 arrays with the shapes of their suffixes, as in :class:`megastack.batch.Microbatch`."""

    tokens_BS: Int64s
    labels_BS: Int64s
    positions_BS: Int64s
    documents_BS: Int64s | None


class Samples(Protocol):
    """A numbered set of samples of one length."""

    sequence_length: int

    def __len__(self) -> int: ...

    def rows(self, indices: Int64s) -> Rows:
        """The samples with these numbers, in this order."""

    def valid_tokens(self, indices: Int64s) -> Int64s:
        """The number of labels in each of these samples that are not ignored, without building the samples."""

    def check_ids(self, vocab: int) -> None:
        """Raise :class:`DataError` if any sample, read by this rank or not, holds an id outside 0..vocab-1."""


class PackedSamples:
    """Samples cut one after another from the stream; the tokens after the last whole sample (`unused`) are dropped."""

    def __init__(self, stream: Stream, sequence_length: int, *, document_mask: bool = True) -> None:
        self.sequence_length = sequence_length
        self._stream = stream
        self.masked = document_mask
        self._count = max(0, (len(stream) - 1) // sequence_length)

    def __len__(self) -> int:
        return self._count

    @property
    def unused(self) -> int:
        """Tokens at the end of the stream that no sample holds, neither as input nor as label."""
        return len(self._stream) - (self._count * self.sequence_length + 1 if self._count else 0)

    def rows(self, indices: Int64s) -> Rows:
        size = self.sequence_length
        window = self._stream.windows(indices * size, size + 1)
        labels = window[:, 1:].copy()
        offset = np.arange(size, dtype=np.int64)
        if not self.masked:
            return Rows(window[:, :-1].copy(), labels, np.tile(offset, (len(indices), 1)), None)
        begins = np.zeros(window.shape, dtype=bool)
        begins[self._stream.inner_starts(indices * size, size)] = True
        labels[begins[:, 1:]] = IGNORED_LABEL
        inputs = begins[:, :-1]
        latest = np.maximum.accumulate(np.where(inputs, offset, 0), axis=1)
        return Rows(window[:, :-1].copy(), labels, offset - latest, np.cumsum(inputs, axis=1, dtype=np.int64))

    def valid_tokens(self, indices: Int64s) -> Int64s:
        size = self.sequence_length
        if not self.masked:
            return np.full(len(indices), size, dtype=np.int64)
        rows, _ = self._stream.inner_starts(indices * size, size)
        return size - np.bincount(rows, minlength=len(indices))

    def check_ids(self, vocab: int) -> None:
        self._stream.check_ids(vocab, sample_of=lambda index: index // self.sequence_length)


class SingleSamples:
    """One document per sample, padded with ignored labels; a document of more than S+1 tokens fills several.

    Consecutive pieces of a long document overlap by one token, the last label of one and the first input of the next,
    so that every token but the first is predicted once. A row holds one document and needs no document numbers.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self._stream = stream
        labels = stream.lengths - 1
        pieces = -(-labels // sequence_length)
        document = np.repeat(np.arange(stream.documents), pieces)
        piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._begin: Int64s = stream.starts[document] + piece * sequence_length
        self._valid: Int64s = np.minimum(labels[document] - piece * sequence_length, sequence_length)

    unused = 0

    def __len__(self) -> int:
        return len(self._begin)

    def rows(self, indices: Int64s) -> Rows:
        size = self.sequence_length
        offset = np.arange(size + 1, dtype=np.int64)
        valid = self._valid[indices][:, None]
        at = self._begin[indices][:, None] + np.minimum(offset, valid)
        window = np.where(offset <= valid, self._stream.tokens[at].astype(np.int64), PADDING_ID)
        labels = np.where(offset[:-1] < valid, window[:, 1:], IGNORED_LABEL)
        return Rows(window[:, :-1].copy(), labels, np.tile(offset[:-1], (len(indices), 1)), None)

    def valid_tokens(self, indices: Int64s) -> Int64s:
        return self._valid[indices]

    def check_ids(self, vocab: int) -> None:
        self._stream.check_ids(vocab, sample_of=lambda index: int(self._begin.searchsorted(index, "right")) - 1)


def padded(rows: Rows, count: int) -> Rows:
    """`rows` followed by rows of ignored labels, `count` in total."""
    missing = count - len(rows.tokens_BS)
    if missing == 0:
        return rows
    shape = (missing, rows.tokens_BS.shape[1])
    positions = np.tile(np.arange(shape[1], dtype=np.int64), (missing, 1))
    documents = rows.documents_BS
    return Rows(
        np.concatenate([rows.tokens_BS, np.full(shape, PADDING_ID, dtype=np.int64)]),
        np.concatenate([rows.labels_BS, np.full(shape, IGNORED_LABEL, dtype=np.int64)]),
        np.concatenate([rows.positions_BS, positions]),
        None if documents is None else np.concatenate([documents, np.zeros(shape, dtype=np.int64)]),
    )


def check_rows(rows: Rows, vocab: int, samples: Int64s) -> None:
    """Raise :class:`DataError` for a token or label outside 0..vocab-1; the error names id, vocabulary and sample.

    Padding rows of the vocabulary are outside it; ignored labels are allowed. This checks the rows that were read,
    while :meth:`Samples.check_ids` checks the whole set before training, with the same result on every rank.
    """
    labels = rows.labels_BS
    bad_tokens = (rows.tokens_BS < 0) | (rows.tokens_BS >= vocab)
    bad_labels = ((labels < 0) | (labels >= vocab)) & (labels != IGNORED_LABEL)
    for kind, ids, bad in (("token", rows.tokens_BS, bad_tokens), ("label", labels, bad_labels)):
        if bad.any():
            row, position = np.argwhere(bad)[0]
            raise DataError(
                f"{kind} id {ids[row, position]} in sample {samples[row]} at position {position}: "
                f"outside model.vocab={vocab}; use ids from 0 to {vocab - 1}, or a larger model.vocab"
            )
