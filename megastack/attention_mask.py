"""The keys that each query of a microbatch may attend to, as a small value on the host.

Packed rows hold several documents, and attention must not cross from one to another. The mask is described by the
offsets of the documents (``cu_seqlens``, as in FlashAttention and Megatron-LM), a span of query positions and a span of
key positions. It is computed once per microbatch with numpy, where the loader has the documents, and takes a few bytes
per document; a dense mask takes S² per row.

A whole row attends to itself causally. The spans describe a part of it: with the sequence split over ranks, the queries
of one span attend to the keys of an earlier span in full, as far as both are in the same document. Torch-free.

Shapes: B rows, S tokens of a row, n documents in all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

CALL = 500_000
"""Multiply-adds of attention that take as long as one more kernel call on a CPU, forward and backward (measured)."""


class Span(NamedTuple):
    """The positions ``start`` to ``stop - 1`` of every row."""

    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Segment:
    """Sequences of equal length that one kernel call computes, in rows laid end to end.

    Args:
        start: the first token.
        batch: the number of sequences, which follow one another.
        length: tokens of a sequence.
        documents: the document of each token of the only sequence, if it holds several; None for causal attention.
    """

    start: int
    batch: int
    length: int
    documents: Int32s | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all its sequences."""
        return self.batch * self.length

    @property
    def pairs(self) -> int:
        """The pairs that a call computes for one head, hidden ones included."""
        return self.batch * self.length**2

    @property
    def hidden(self) -> npt.NDArray[np.bool_] | None:
        """True where a key is hidden from a query, (length, length); None for causal attention."""
        if self.documents is None:
            return None
        return (self.documents[:, None] != self.documents) | ~np.tri(self.length, dtype=bool)


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys are visible: those of the query's document and, if causal, no later ones.

    Args:
        cu_seqlens: offsets of the documents in the rows laid end to end, (n + 1) int32; every row begins a document.
        rows: B.
        queries: positions of the queries in their row.
        keys: positions of the keys in their row.
        causal: whether later keys are hidden, for equal spans. Otherwise the keys must precede the queries.
    """

    cu_seqlens: Int32s
    rows: int
    queries: Span
    keys: Span
    causal: bool = True

    @classmethod
    def of(cls, documents_BS: Int64s) -> AttentionMask:
        """The causal mask of whole rows, from the document number of each token, non-decreasing within a row."""
        rows, length = documents_BS.shape
        begins_BS = np.ones((rows, length), dtype=bool)
        begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
        cu_seqlens = np.append(np.flatnonzero(begins_BS), rows * length).astype(np.int32)
        return cls(cu_seqlens, rows, Span(0, length), Span(0, length))

    @cached_property
    def covers_rows(self) -> bool:
        """Whether every token of the rows is a query and a key of a causal mask."""
        whole = Span(0, int(self.cu_seqlens[-1]) // self.rows)
        return self.causal and self.queries == whole == self.keys

    @property
    def has_boundaries(self) -> bool:
        """Whether any row holds several documents."""
        return len(self.cu_seqlens) - 1 > self.rows

    @cached_property
    def query_lengths(self) -> Int64s:
        """The number of queries in each document, (n)."""
        return self._lengths_in(self.queries)

    @cached_property
    def key_lengths(self) -> Int64s:
        """The number of keys in each document, (n)."""
        return self._lengths_in(self.keys)

    def _lengths_in(self, span: Span) -> Int64s:
        lengths = np.diff(self.cu_seqlens).astype(np.int64)
        starts = self.cu_seqlens[:-1] % (int(self.cu_seqlens[-1]) // self.rows)
        return np.maximum(np.minimum(starts + lengths, span.stop) - np.maximum(starts, span.start), 0)

    @cached_property
    def max_seqlen(self) -> int:
        """The largest number of keys in a document."""
        return int(self.key_lengths.max())

    @property
    def pairs(self) -> int:
        """The number of visible pairs of a query and a key: the work of one head."""
        queries, keys = self.query_lengths, self.key_lengths
        return int((queries * (keys + 1) // 2 if self.causal else queries * keys).sum())

    def segments(self, width: int | None = None) -> tuple[Segment, ...]:
        """The documents of whole rows, grouped into kernel calls; computed once for each width.

        Documents of equal length that follow one another form a batch. With a ``width``, a short document joins the one
        before it in a masked sequence, if a call of its own costs more than the hidden pairs (:data:`CALL`).

        Args:
            width: multiply-adds for a pair, H·K of this rank; None never computes pairs of different documents.
        """
        assert self.covers_rows
        if width not in self._segments:
            hidden = 0 if width is None else CALL // width
            self._segments[width] = tuple(_segments(self.query_lengths.tolist(), hidden))
        return self._segments[width]

    @cached_property
    def _segments(self) -> dict[int | None, tuple[Segment, ...]]:
        return {}


def _segments(lengths: list[int], hidden: int) -> Iterator[Segment]:
    """The segments of documents of these lengths, where computing ``hidden`` masked pairs costs as much as a call."""
    start = 0
    for batch, together in _groups(lengths, hidden):
        numbers = np.repeat(np.arange(len(together), dtype=np.int32), together) if len(together) > 1 else None
        yield Segment(start, batch, sum(together), numbers)
        start += batch * sum(together)


def _groups(lengths: list[int], hidden: int) -> Iterator[tuple[int, list[int]]]:
    """Batches of equal documents, and short documents in one sequence, as ``(batch, lengths of a sequence)``."""
    together = list[int]()
    for length, equal in groupby(lengths):
        batch = len(list(equal))
        if together and (batch > 1 or 2 * sum(together) * length > hidden):
            yield 1, together
            together = []
        if batch > 1:
            yield batch, [length]
        else:
            together.append(length)
    if together:
        yield 1, together
