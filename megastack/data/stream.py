"""The tokens of a split: one flat array, and where each document begins in it.

Documents stand back to back in corpus order, each with its end id if the tokenizer has one. Ids take one, two or four
bytes, whatever holds the tokenizer's largest. Boundaries are kept as indices and never read off the ids, so text that
happens to contain an end id, and tokenizers without one, cause no harm.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from megastack.data.split import held_out
from megastack.data.tokenizers import Ids, Tokenizer, ended
from megastack.errors import DataError

Int64s = npt.NDArray[np.int64]

_BATCH = 1024  # documents tokenized at a time


@dataclass(frozen=True)
class TokenStream:
    """Documents as ids, back to back.

    Args:
        tokens: (T,) unsigned ids, read-only.
        starts: (documents,) int64, the index of each document's first token; strictly increasing from 0.
    """

    tokens: Ids
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(documents,) tokens of each document, its end id included."""
        return np.diff(self.starts, append=len(self.tokens))

    def windows(self, begins: Int64s, size: int) -> Int64s:
        """(rows, size): the tokens from each of these places on."""
        if not len(begins):
            return np.empty((0, size), dtype=np.int64)  # a stream may be shorter than a window
        return np.lib.stride_tricks.sliding_window_view(self.tokens, size)[begins].astype(np.int64)

    def inner_starts(self, begins: Int64s, size: int) -> tuple[Int64s, Int64s]:
        """Row and place (1 to size) of each document start among the `size` tokens after each of these places."""
        low, high = self.starts.searchsorted(begins, "right"), self.starts.searchsorted(begins + size, "right")
        count = high - low
        row = np.repeat(np.arange(len(begins)), count)
        document = np.arange(count.sum()) + np.repeat(low - np.cumsum(count) + count, count)
        return row, self.starts[document] - begins[row]

    def check_ids(self, vocab: int, sample_of: Callable[[int], int]) -> None:
        """Raises :class:`DataError` for an id that is not below `vocab`, naming it and the sample that it is in."""
        if len(self.tokens) and int(self.tokens.max()) >= vocab:
            place = int(np.argmax(self.tokens >= vocab))
            raise DataError(
                f"token id {self.tokens[place]} in sample {sample_of(place)}: outside model.vocab={vocab}; "
                f"use ids from 0 to {vocab - 1}, or a larger model.vocab"
            )

    def digest(self) -> str:
        """A hash of ids and boundaries, whatever width the ids are kept in."""
        state = hashlib.blake2b(self.starts.astype("<i8").tobytes(), digest_size=16)
        for begin in range(0, len(self.tokens), 1 << 20):
            state.update(self.tokens[begin : begin + (1 << 20)].astype("<u4").tobytes())
        return state.hexdigest()


def id_type(size: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest unsigned type that holds the ids 0 to size-1."""
    return np.min_scalar_type(max(size - 1, 0))


def stream_of(documents: Iterable[Ids], size: int) -> TokenStream:
    """The stream of `documents`, empty ones left out; raises :class:`DataError` for an id outside 0..size-1."""
    kept = [document for document in documents if len(document)]
    for number, document in enumerate(kept):
        _check_range(document, size, number)
    tokens = np.concatenate([d.astype(id_type(size)) for d in kept]) if kept else np.empty(0, id_type(size))
    starts = np.cumsum([0, *(len(document) for document in kept)], dtype=np.int64)[:-1]
    tokens.setflags(write=False)
    return TokenStream(tokens, starts)


def tokenize(documents: Iterable[bytes], tokenizer: Tokenizer, fraction: float) -> tuple[TokenStream, TokenStream]:
    """The training and the validation stream of `documents`; each document ends with the tokenizer's end id."""
    sides: tuple[list[TokenStream], list[TokenStream]] = ([], [])
    for batch in _batches(documents):
        encoded = [ended(ids, tokenizer.end) for ids in tokenizer.encode(batch)]
        held = [held_out(document, fraction) for document in batch]
        for wanted, side in zip((False, True), sides, strict=True):
            ids = (ids for ids, out in zip(encoded, held, strict=True) if out is wanted)
            side.append(stream_of(ids, tokenizer.size))
    return _joined(sides[0], tokenizer.size), _joined(sides[1], tokenizer.size)


def _batches(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    rest = iter(documents)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def _check_range(document: Ids, size: int, number: int) -> None:
    low, high = int(document.min()), int(document.max())
    if low < 0 or high >= size:
        raise DataError(f"document {number} holds the id {low if low < 0 else high}; ids run from 0 to {size - 1}")


def _joined(streams: Sequence[TokenStream], size: int) -> TokenStream:
    if not streams:
        return stream_of([], size)
    tokens = np.concatenate([stream.tokens for stream in streams])
    tokens.setflags(write=False)
    offsets = np.cumsum([0, *(len(stream.tokens) for stream in streams)], dtype=np.int64)[:-1]
    starts = np.concatenate([s.starts + offset for s, offset in zip(streams, offsets, strict=True)])
    return TokenStream(tokens, starts)
