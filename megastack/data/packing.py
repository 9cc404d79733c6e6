"""Fixed-length samples out of a token stream, with labels, positions and document numbers.

Packed (the default): sample i is the tokens [i·S, i·S + S] of the stream, S inputs and the same shifted by one as
labels. Documents run on from sample to sample; with document masks a row restarts positions and counts up a document
number wherever a document begins, and the last token of a document asks for no label: to predict its end id is fair, to
predict the start of an unrelated text is not. Not packed: every sample is one document, a longer one makes several.

Everything is vectorised over the rows asked for; nothing is precomputed per sample of a packed stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastack.batch import IGNORED_LABEL
from megastack.data.stream import TokenStream
from megastack.errors import DataError

Int64s = npt.NDArray[np.int64]

PADDING_ID = 0
"""The token where a row has none; its label is ignored, and causal attention hides it from what comes before."""


@dataclass(frozen=True)
class Rows:
    """Samples as int64 arrays of the shapes that their names say, as in :class:`megastack.batch.Microbatch`."""

    tokens_BS: Int64s
    labels_BS: Int64s
    positions_BS: Int64s
    documents_BS: Int64s | None


class Samples(Protocol):
    """A numbered set of samples, all of one length."""

    sequence_length: int

    def __len__(self) -> int: ...

    def rows(self, indices: Int64s) -> Rows:
        """The samples of the given numbers, in that order."""

    def valid_tokens(self, indices: Int64s) -> Int64s:
        """Labels that are not ignored in each of these samples, without building them."""

    def check_ids(self, vocab: int) -> None:
        """Raises :class:`DataError` if any sample, read here or not, holds an id outside 0..vocab-1."""


class Stream(Protocol):
    """Tokens one after another with random access, in memory or in files."""

    @property
    def documents(self) -> int: ...

    def __len__(self) -> int:
        """Tokens."""

    def windows(self, begins: Int64s, size: int) -> Int64s:
        """(rows, size): the tokens from each of these places on."""

    def inner_starts(self, begins: Int64s, size: int) -> tuple[Int64s, Int64s]:
        """Row and place (1 to size) of each document start among the `size` tokens after each of these places."""

    def check_ids(self, vocab: int, sample_of: Callable[[int], int]) -> None:
        """Raises :class:`DataError` for an id outside 0..vocab-1, as far as the stream can tell before it is read."""

    def digest(self) -> str:
        """Equal for equal tokens and boundaries."""


class PackedSamples:
    """Samples cut one after another from the stream; tokens beyond the last whole sample (`unused`) are left out."""

    def __init__(self, stream: Stream, sequence_length: int, *, document_mask: bool = True) -> None:
        self.sequence_length = sequence_length
        self._stream = stream
        self.masked = document_mask
        self._count = max(0, (len(stream) - 1) // sequence_length)

    def __len__(self) -> int:
        return self._count

    @property
    def unused(self) -> int:
        """Tokens at the end of the stream that no sample holds, as input or as label."""
        return len(self._stream) - (self._count * self.sequence_length + 1 if self._count else 0)

    def rows(self, indices: Int64s) -> Rows:
        size = self.sequence_length
        window = self._stream.windows(indices * size, size + 1)
        labels = window[:, 1:].copy()
        place = np.arange(size, dtype=np.int64)
        if not self.masked:
            return Rows(window[:, :-1].copy(), labels, np.tile(place, (len(indices), 1)), None)
        begins = np.zeros(window.shape, dtype=bool)
        begins[self._stream.inner_starts(indices * size, size)] = True
        labels[begins[:, 1:]] = IGNORED_LABEL
        inputs = begins[:, :-1]
        latest = np.maximum.accumulate(np.where(inputs, place, 0), axis=1)
        return Rows(window[:, :-1].copy(), labels, place - latest, np.cumsum(inputs, axis=1, dtype=np.int64))

    def valid_tokens(self, indices: Int64s) -> Int64s:
        size = self.sequence_length
        if not self.masked:
            return np.full(len(indices), size, dtype=np.int64)
        rows, _ = self._stream.inner_starts(indices * size, size)
        return size - np.bincount(rows, minlength=len(indices))

    def check_ids(self, vocab: int) -> None:
        self._stream.check_ids(vocab, sample_of=lambda place: place // self.sequence_length)


class SingleSamples:
    """One document a sample, padded with ignored labels; a document of more than S+1 tokens makes several samples.

    The pieces of a long document overlap by the one token that is the label of one and the first input of the next, so
    each of its tokens but the first is predicted once. A row holds one document, so it needs no document numbers.
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
        place = np.arange(size + 1, dtype=np.int64)
        valid = self._valid[indices][:, None]
        at = self._begin[indices][:, None] + np.minimum(place, valid)
        window = np.where(place <= valid, self._stream.tokens[at].astype(np.int64), PADDING_ID)
        labels = np.where(place[:-1] < valid, window[:, 1:], IGNORED_LABEL)
        return Rows(window[:, :-1].copy(), labels, np.tile(place[:-1], (len(indices), 1)), None)

    def valid_tokens(self, indices: Int64s) -> Int64s:
        return self._valid[indices]

    def check_ids(self, vocab: int) -> None:
        self._stream.check_ids(vocab, sample_of=lambda place: int(self._begin.searchsorted(place, "right")) - 1)


def padded(rows: Rows, count: int) -> Rows:
    """`rows` followed by fully ignored ones, `count` in all."""
    missing = count - len(rows.tokens_BS)
    if missing == 0:
        return rows
    shape = (missing, rows.tokens_BS.shape[1])
    place = np.tile(np.arange(shape[1], dtype=np.int64), (missing, 1))
    documents = rows.documents_BS
    return Rows(
        np.concatenate([rows.tokens_BS, np.full(shape, PADDING_ID, dtype=np.int64)]),
        np.concatenate([rows.labels_BS, np.full(shape, IGNORED_LABEL, dtype=np.int64)]),
        np.concatenate([rows.positions_BS, place]),
        None if documents is None else np.concatenate([documents, np.zeros(shape, dtype=np.int64)]),
    )


def check_rows(rows: Rows, vocab: int, samples: Int64s) -> None:
    """Raises :class:`DataError` for a token or a label outside 0..vocab-1, naming id, vocabulary and sample.

    Padded rows of the vocabulary are outside it. Ignored labels are fine. It sees what samples of any origin really
    hold, where :meth:`Samples.check_ids` asks the whole set beforehand, so that all ranks refuse alike.
    """
    labels = rows.labels_BS
    bad_tokens = (rows.tokens_BS < 0) | (rows.tokens_BS >= vocab)
    bad_labels = ((labels < 0) | (labels >= vocab)) & (labels != IGNORED_LABEL)
    for kind, ids, bad in (("token", rows.tokens_BS, bad_tokens), ("label", labels, bad_labels)):
        if bad.any():
            row, place = np.argwhere(bad)[0]
            raise DataError(
                f"{kind} id {ids[row, place]} in sample {samples[row]} at position {place}: "
                f"outside model.vocab={vocab}; use ids from 0 to {vocab - 1}, or a larger model.vocab"
            )
