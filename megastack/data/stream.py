"""The tokens of one split as a stream with random access, and the rule that decides which documents are held out.

Text becomes a :class:`TokenStream` in memory: documents back to back in corpus order, each followed by its end id if
the tokenizer has one. Ids are stored in one, two or four bytes, as the tokenizer's largest id requires. Boundaries are
stored as indices and never inferred from ids, so text that contains an end id and tokenizers without one are handled
correctly.

Token files become a :class:`FileStream`: ranges of the files, read on demand, without a list of documents or samples.

From text, the documents with a small hash are held out. The decision depends on the bytes and the fraction alone, never
on a seed, a position or the other documents. Runs with different seeds therefore share one validation set, equal
documents are never in both splits, and the documents of a growing corpus stay in their splits. From token files, blocks
of whole documents are held out: each file is divided into up to 64 parts, and the last fraction of each part is held
out, with both ends moved to the next document start. This takes two bisections per block, whatever the length of the
file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastack.data.token_files import TokenFile, check_ids
from megastack.data.tokenizers import Ids, Tokenizer, append_end
from megastack.errors import DataError

Int64s = npt.NDArray[np.int64]

MAX_BLOCKS = 64
"""The maximum number of blocks of a file that are held out."""

_BATCH = 1024  # documents tokenized at a time
_DOCUMENTS_PER_BLOCK = 4
_CHECKED_TOKENS = 1 << 16  # tokens of a range whose ids are checked before training
_PROBES, _PROBE_TOKENS = 16, 256


class Stream(Protocol):
    """Tokens one after another with random access, in memory or in files."""

    @property
    def documents(self) -> int: ...

    def __len__(self) -> int:
        """The number of tokens."""

    def windows(self, begins: Int64s, size: int) -> Int64s:
        """(rows, size): `size` tokens from each begin on."""

    def inner_starts(self, begins: Int64s, size: int) -> tuple[Int64s, Int64s]:
        """Row and offset (1 to size) of each document start among the `size` tokens after each begin."""

    def check_ids(self, vocab: int, sample_of: Callable[[int], int]) -> None:
        """Raise :class:`DataError` for an id outside 0..vocab-1, as far as this can be found before reading."""

    def digest(self) -> str:
        """A hash that is equal for equal tokens and boundaries."""


@dataclass(frozen=True)
class TokenStream:
    """Documents as ids, back to back.

    Args:
        tokens: (T,) unsigned ids, read-only.
        starts: (documents,) int64, the index of each document's first token; strictly increasing from 0.
    """

    tokens: Ids
    starts: Int64s

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def documents(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> Int64s:
        """(documents,) tokens of each document, its end id included."""
        return np.diff(self.starts, append=len(self.tokens))

    def windows(self, begins: Int64s, size: int) -> Int64s:
        """(rows, size): `size` tokens from each begin on."""
        if not len(begins):
            return np.empty((0, size), dtype=np.int64)  # a stream may be shorter than a window
        return np.lib.stride_tricks.sliding_window_view(self.tokens, size)[begins].astype(np.int64)

    def inner_starts(self, begins: Int64s, size: int) -> tuple[Int64s, Int64s]:
        """Row and offset (1 to size) of each document start among the `size` tokens after each begin."""
        low, high = self.starts.searchsorted(begins, "right"), self.starts.searchsorted(begins + size, "right")
        count = high - low
        row = np.repeat(np.arange(len(begins)), count)
        document = np.arange(count.sum()) + np.repeat(low - np.cumsum(count) + count, count)
        return row, self.starts[document] - begins[row]

    def check_ids(self, vocab: int, sample_of: Callable[[int], int]) -> None:
        """Raise :class:`DataError` for an id that is not below `vocab`; the error names the id and its sample."""
        if len(self.tokens) and int(self.tokens.max()) >= vocab:
            index = int(np.argmax(self.tokens >= vocab))
            raise DataError(
                f"token id {self.tokens[index]} in sample {sample_of(index)}: outside model.vocab={vocab}; "
                f"use ids from 0 to {vocab - 1}, or a larger model.vocab"
            )

    def digest(self) -> str:
        """A hash of ids and boundaries, independent of the width in which ids are stored."""
        state = hashlib.blake2b(self.starts.astype("<i8").tobytes(), digest_size=16)
        for begin in range(0, len(self.tokens), 1 << 20):
            state.update(self.tokens[begin : begin + (1 << 20)].astype("<u4").tobytes())
        return state.hexdigest()


@dataclass(frozen=True)
class TokenRange:
    """The tokens of a file in [`begin`, `end`); a document begins at `begin`."""

    file: TokenFile
    begin: int
    end: int


class FileStream:
    """Ranges of token files, back to back."""

    def __init__(self, ranges: Sequence[TokenRange]) -> None:
        self._ranges = list(ranges)
        self._offsets = np.cumsum([0, *(each.end - each.begin for each in ranges)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @property
    def files(self) -> list[TokenFile]:
        """The files of the ranges, each once."""
        return list({id(each.file): each.file for each in self._ranges}.values())

    @property
    def documents(self) -> int:
        """Documents in all ranges; a range of an array without documents counts as one."""
        return sum(1 + each.file.count(each.begin + 1, each.end) for each in self._ranges)

    def windows(self, begins: Int64s, size: int) -> Int64s:
        """(rows, size): `size` tokens from each begin on."""
        out = np.empty((len(begins), size), dtype=np.int64)
        for row, offset, source, begin, end in self._pieces(begins, size):
            out[row, offset : offset + end - begin] = source.file.read(begin, end)
        return out

    def inner_starts(self, begins: Int64s, size: int) -> tuple[Int64s, Int64s]:
        """Row and offset (1 to size) of each document start among the `size` tokens after each begin."""
        rows, offsets = [], []
        for row, offset, source, begin, end in self._pieces(begins + 1, size):
            found = source.file.starts(begin, end) - begin + offset
            if begin == source.begin and (not len(found) or found[0] != offset):
                found = np.insert(found, 0, offset)
            rows.append(np.full(len(found), row, dtype=np.int64))
            offsets.append(found + 1)
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *rows]), np.concatenate([empty, *offsets])

    def check_ids(self, vocab: int, sample_of: Callable[[int], int]) -> None:
        """Raise :class:`DataError` for an id outside 0..vocab-1 among the first tokens of each range."""
        for each in self._ranges:
            check_ids(each.file, vocab, each.begin, min(each.end, each.begin + _CHECKED_TOKENS))

    def digest(self) -> str:
        """A hash of the ranges and of probes of their tokens, independent of file paths and id widths."""
        state = hashlib.blake2b(digest_size=16)
        for each in self._ranges:
            state.update(repr((each.begin, each.end, each.file.tokens, each.file.boundaries)).encode())
            for probe in range(_PROBES):
                at = each.begin + (each.end - each.begin) * probe // _PROBES
                state.update(each.file.read(at, min(each.end, at + _PROBE_TOKENS)).astype("<i8").tobytes())
        return state.hexdigest()

    def _pieces(self, begins: Int64s, size: int) -> Iterator[tuple[int, int, TokenRange, int, int]]:
        """Row, offset in the row, range, and begin and end in its file, for each piece of the windows."""
        numbers = self._offsets.searchsorted(begins, "right") - 1
        for row, (first, number) in enumerate(zip(begins.tolist(), numbers.tolist(), strict=True)):
            offset = 0
            while offset < size:
                source = self._ranges[number]
                begin = source.begin + first + offset - int(self._offsets[number])
                end = min(source.end, begin + size - offset)
                yield row, offset, source, begin, end
                offset, number = offset + end - begin, number + 1


def check_fraction(fraction: float) -> None:
    """Raise :class:`DataError` unless 0 <= fraction < 1; 0 means a run without validation."""
    if not 0 <= fraction < 1:
        raise DataError(f"data.validation_fraction={fraction}: must be at least 0 and below 1; use for example 0.05")


def held_out(document: bytes, fraction: float) -> bool:
    """Whether `document` belongs to the validation split; true for about `fraction` of all documents."""
    number = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest())
    return number < fraction * 2.0**64


def split_file(file: TokenFile, fraction: float) -> tuple[list[TokenRange], list[TokenRange]]:
    """The training and the validation ranges of a file; about `fraction` of its tokens are held out."""
    blocks = max(1, min(MAX_BLOCKS, int(file.boundaries * fraction / _DOCUMENTS_PER_BLOCK)))
    train, held, before = [], [], 0
    for block in range(blocks):
        begin, end = file.tokens * block // blocks, file.tokens * (block + 1) // blocks
        low = file.next_boundary(max(before, end - round((end - begin) * fraction)))
        high = file.next_boundary(end)
        train.append(TokenRange(file, before, low))
        held.append(TokenRange(file, low, high))
        before = high
    return _nonempty_ranges(train), _nonempty_ranges(held)


def _nonempty_ranges(ranges: Sequence[TokenRange]) -> list[TokenRange]:
    return [each for each in ranges if each.begin < each.end]


def tokenize(documents: Iterable[bytes], tokenizer: Tokenizer, fraction: float) -> tuple[TokenStream, TokenStream]:
    """The training and the validation stream of `documents`; each document ends with the tokenizer's end id."""
    splits: tuple[list[TokenStream], list[TokenStream]] = ([], [])
    for batch in _batches(documents):
        encoded = [append_end(ids, tokenizer.end) for ids in tokenizer.encode(batch)]
        held = [held_out(document, fraction) for document in batch]
        for side, split in zip((False, True), splits, strict=True):
            ids = (ids for ids, out in zip(encoded, held, strict=True) if out is side)
            split.append(stream_of(ids, tokenizer.size))
    return _concatenated(splits[0], tokenizer.size), _concatenated(splits[1], tokenizer.size)


def stream_of(documents: Iterable[Ids], size: int) -> TokenStream:
    """The stream of `documents`, without empty ones; raises :class:`DataError` for an id outside 0..size-1."""
    kept = [document for document in documents if len(document)]
    for number, document in enumerate(kept):
        _check_range(document, size, number)
    dtype = narrowest_dtype(size)
    tokens = np.concatenate([document.astype(dtype) for document in kept]) if kept else np.empty(0, dtype)
    starts = np.cumsum([0, *(len(document) for document in kept)], dtype=np.int64)[:-1]
    tokens.setflags(write=False)
    return TokenStream(tokens, starts)


def narrowest_dtype(size: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest unsigned type that holds the ids 0 to size-1."""
    return np.min_scalar_type(max(size - 1, 0))


def _batches(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    rest = iter(documents)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def _check_range(document: Ids, size: int, number: int) -> None:
    low, high = int(document.min()), int(document.max())
    if low < 0 or high >= size:
        raise DataError(f"document {number} holds the id {low if low < 0 else high}; ids run from 0 to {size - 1}")


def _concatenated(streams: Sequence[TokenStream], size: int) -> TokenStream:
    if not streams:
        return stream_of([], size)
    tokens = np.concatenate([stream.tokens for stream in streams])
    tokens.setflags(write=False)
    offsets = np.cumsum([0, *(len(stream.tokens) for stream in streams)], dtype=np.int64)[:-1]
    starts = np.concatenate([s.starts + offset for s, offset in zip(streams, offsets, strict=True)])
    return TokenStream(tokens, starts)
