"""Blends: sources drawn by weight, with random access to any entry of the infinite sample stream.

Weights become whole shares of a period of 65,536 entries. Within a period the k-th entry of a source is placed at time
(k + 1/2) / share, so that at every point each source has received its fraction of the entries, to within a few. Entry j
depends on j alone, and the k-th draw of a source is entry k of that source's own infinite order. Training keeps no
counters.

Weights may change when a run resumes. The consumption of each source at a change follows from the earlier changes, and
the source continues there: no sample is repeated or skipped (:mod:`megastack.data.blend_weights` keeps the history).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megastack.batch import IGNORED_LABEL
from megastack.data.blend_weights import PERIOD, History, normalized
from megastack.data.order import Cursor, SampleOrder
from megastack.data.packing import Rows, Samples
from megastack.random import stream_key

Int64s = npt.NDArray[np.int64]


def shares(weights: Sequence[float]) -> Int64s:
    """Whole shares of a period by largest remainder; at least one for every positive weight, however small."""
    ideal = np.asarray(normalized(weights)) * PERIOD
    counts = np.where(np.asarray(weights) > 0, np.maximum(np.floor(ideal), 1), 0).astype(np.int64)
    missing = PERIOD - int(counts.sum())
    if missing > 0:
        counts[np.argsort(counts - ideal, kind="stable")[:missing]] += 1
    while missing < 0:  # tiny weights were rounded up; reduce the largest shares, to no less than one
        largest = counts.argmax()
        excess = min(-missing, int(counts[largest]) - 1)
        counts[largest] -= excess
        missing += excess
    return counts


class BlendOrder:
    """The infinite order over several sources, whose samples are numbered one source after the other.

    Args:
        counts: samples of each source, by digest.
        history: past and current weights; see :func:`megastack.data.blend_weights.extend_history`.
        seed: determines the order within each source.
        cursors: positions of sources that were drawn before the history begins; the sources continue there.
    """

    def __init__(
        self, counts: Mapping[str, int], history: History, seed: int, cursors: Mapping[str, Cursor] | None = None
    ) -> None:
        starts = {digest: (cursors or {}).get(digest, Cursor(stream_key(seed, digest))) for digest in counts}
        self._starts = starts
        self._offsets = np.cumsum([0, *counts.values()], dtype=np.int64)
        self._orders = [SampleOrder(count, starts[digest].seed) if count else None for digest, count in counts.items()]
        self._begins = np.array([change.begin for change in history], dtype=np.int64)
        consumed = np.array([each.draws for each in starts.values()], dtype=np.int64)
        self._patterns: list[_Pattern] = []
        for change, end in zip(history, [*(later.begin for later in history[1:]), None], strict=True):
            pattern = _Pattern([change.weights.get(digest, 0.0) for digest in counts], consumed)
            self._patterns.append(pattern)
            if end is not None:
                consumed = pattern.consumed(end - change.begin)

    def many(self, entries: Int64s) -> Int64s:
        """The sample at each of these entries."""
        sources, draws = self.draws(entries)
        samples = np.empty_like(draws)
        for source in np.unique(sources):
            chosen, order = sources == source, self._orders[source]
            assert order is not None, "a source without samples is not drawn"
            samples[chosen] = self._offsets[source] + order.many(draws[chosen])
        return samples

    def cursors(self, entry: int) -> dict[str, Cursor]:
        """The position of each source before `entry` is drawn; `entry` is after the last change of weights."""
        draws = self._patterns[-1].consumed(entry - int(self._begins[-1]))
        return {
            digest: Cursor(start.seed, int(count))
            for (digest, start), count in zip(self._starts.items(), draws, strict=True)
        }

    def draws(self, entries: Int64s) -> tuple[Int64s, Int64s]:
        """The source of each entry, and the number of earlier draws from that source."""
        entries = np.asarray(entries, dtype=np.int64)
        sources, draws = np.empty_like(entries), np.empty_like(entries)
        which = self._begins.searchsorted(entries, "right") - 1
        for number in np.unique(which):
            chosen = which == number
            sources[chosen], draws[chosen] = self._patterns[number].draws(entries[chosen] - self._begins[number])
        return sources, draws


class _Pattern:
    """The periodic pattern of sources under constant weights; entries are counted from its beginning."""

    def __init__(self, weights: Sequence[float], consumed: Int64s) -> None:
        self._consumed, self._shares = consumed, shares(weights)
        source = np.repeat(np.arange(len(weights)), self._shares)
        turn = np.concatenate([np.arange(share) for share in self._shares])
        order = np.argsort((turn + 0.5) / self._shares[source], kind="stable")
        self._sources, self._turns = source[order], turn[order]

    def draws(self, entries: Int64s) -> tuple[Int64s, Int64s]:
        periods, rest = np.divmod(entries, PERIOD)
        source = self._sources[rest]
        return source, self._consumed[source] + periods * self._shares[source] + self._turns[rest]

    def consumed(self, entries: int) -> Int64s:
        """Draws of each source after this many entries of the pattern, earlier patterns included."""
        periods, rest = divmod(entries, PERIOD)
        begun = np.bincount(self._sources[:rest], minlength=len(self._shares))
        return self._consumed + periods * self._shares + begun


class ConcatSamples:
    """The samples of several sources, numbered one source after the other."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.sequence_length = parts[0].sequence_length
        self._parts = list(parts)
        self._offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def rows(self, indices: Int64s) -> Rows:
        shape = (len(indices), self.sequence_length)
        tokens, labels = np.empty(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        positions, documents, masked = np.empty(shape, np.int64), np.zeros(shape, np.int64), False
        for part, chosen, within in self._by_part(indices):
            rows = part.rows(within)
            tokens[chosen], labels[chosen], positions[chosen] = rows.tokens_BS, rows.labels_BS, rows.positions_BS
            if rows.documents_BS is not None:
                masked, documents[chosen] = True, rows.documents_BS
        return Rows(tokens, labels, positions, documents if masked else None)

    def valid_tokens(self, indices: Int64s) -> Int64s:
        out = np.zeros(len(indices), dtype=np.int64)
        for part, chosen, within in self._by_part(indices):
            out[chosen] = part.valid_tokens(within)
        return out

    def check_ids(self, vocab: int) -> None:
        for part in self._parts:
            part.check_ids(vocab)

    def _by_part(self, indices: Int64s) -> list[tuple[Samples, npt.NDArray[np.bool_], Int64s]]:
        numbers = self._offsets.searchsorted(indices, "right") - 1
        chosen = [(number, numbers == number) for number in np.unique(numbers)]
        return [(self._parts[number], mask, indices[mask] - self._offsets[number]) for number, mask in chosen]
