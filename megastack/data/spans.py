"""A split of token files: stretches of them, read as one stream, without a list of documents or samples.

Held out are blocks of whole documents, spread over each file: a file is divided into up to 64 parts, and the last share
of each part is held out, both ends moved to the next document start. That takes two bisections a block, however long
the file; every document stands whole on one side; and a file's split depends on nothing but the file and the fraction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megastack.data.token_files import TokenFile, check_ids

Int64s = npt.NDArray[np.int64]

MOST_BLOCKS = 64
"""The most blocks of a file that are held out."""

_DOCUMENTS_A_BLOCK = 4
_LOOKED_AT = 1 << 16  # tokens of a span whose ids are checked before training
_PROBES, _PROBE = 16, 256


@dataclass(frozen=True)
class Span:
    """The tokens of a file from `begin` to before `end`; a document begins at `begin`."""

    file: TokenFile
    begin: int
    end: int


def split_file(file: TokenFile, fraction: float) -> tuple[list[Span], list[Span]]:
    """The training and the validation spans of a file; about `fraction` of its tokens are held out."""
    parts = max(1, min(MOST_BLOCKS, int(file.places * fraction / _DOCUMENTS_A_BLOCK)))
    train, held, before = [], [], 0
    for part in range(parts):
        begin, end = file.tokens * part // parts, file.tokens * (part + 1) // parts
        low, high = file.cut(max(before, end - round((end - begin) * fraction))), file.cut(end)
        train.append(Span(file, before, low))
        held.append(Span(file, low, high))
        before = high
    return [[span for span in side if span.begin < span.end] for side in (train, held)]  # type: ignore[return-value]


class SpanStream:
    """Spans back to back, as a stream of tokens for :class:`megastack.data.packing.PackedSamples`."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = list(spans)
        self._offsets = np.cumsum([0, *(span.end - span.begin for span in spans)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    @property
    def files(self) -> list[TokenFile]:
        """The files that the spans lie in, each once."""
        return list({id(span.file): span.file for span in self._spans}.values())

    @property
    def documents(self) -> int:
        """Documents of all spans; a stretch of an array without documents counts as one."""
        return sum(1 + span.file.count(span.begin + 1, span.end) for span in self._spans)

    def windows(self, begins: Int64s, size: int) -> Int64s:
        """(rows, size): the tokens from each of these places on."""
        out = np.empty((len(begins), size), dtype=np.int64)
        for row, place, span, here, there in self._pieces(begins, size):
            out[row, place : place + there - here] = span.file.read(here, there)
        return out

    def inner_starts(self, begins: Int64s, size: int) -> tuple[Int64s, Int64s]:
        """Row and place of each document start among the `size` tokens that follow each of these places."""
        rows, places = [], []
        for row, place, span, here, there in self._pieces(begins + 1, size):
            found = span.file.starts(here, there) - here + place
            if here == span.begin and (not len(found) or found[0] != place):
                found = np.insert(found, 0, place)
            rows.append(np.full(len(found), row, dtype=np.int64))
            places.append(found + 1)
        empty = np.empty(0, dtype=np.int64)
        return np.concatenate([empty, *rows]), np.concatenate([empty, *places])

    def check_ids(self, vocab: int, sample_of: Callable[[int], int]) -> None:
        """Raises :class:`DataError` for an id outside 0..vocab-1 among the first of each span."""
        for span in self._spans:
            check_ids(span.file, vocab, span.begin, min(span.end, span.begin + _LOOKED_AT))

    def digest(self) -> str:
        """A hash of the spans and of probes of what they hold, wherever the files lie, however wide their ids."""
        state = hashlib.blake2b(digest_size=16)
        for span in self._spans:
            state.update(repr((span.begin, span.end, span.file.tokens, span.file.places)).encode())
            for probe in range(_PROBES):
                at = span.begin + (span.end - span.begin) * probe // _PROBES
                state.update(span.file.read(at, min(span.end, at + _PROBE)).astype("<i8").tobytes())
        return state.hexdigest()

    def _pieces(self, begins: Int64s, size: int) -> Iterator[tuple[int, int, Span, int, int]]:
        """Row, place in the row, span and range in its file of each piece of the windows."""
        numbers = self._offsets.searchsorted(begins, "right") - 1
        for row, (begin, number) in enumerate(zip(begins.tolist(), numbers.tolist(), strict=True)):
            place = 0
            while place < size:
                span = self._spans[number]
                here = span.begin + begin + place - int(self._offsets[number])
                there = min(span.end, here + size - place)
                yield row, place, span, here, there
                place, number = place + there - here, number + 1
