"""Several sources with weights, drawn by a fixed rule that can be asked about any entry of the endless stream.

Weights become whole shares of a period of 65,536 entries, and the pattern of a period puts the k-th entry of a source
at time (k + 1/2) / share: at every point each source has had its weight's part of the entries, up to a few. Entry j
follows from j alone; a source's k-th draw is entry k of its own endless order. So nothing is counted while training.

Weights may change at a resume. A history of stretches (the entry it begins with, the weights) is part of a
checkpoint; how far each source was consumed when a stretch begins follows from the stretches before it, and the source
goes on from there: nothing is repeated, nothing left out. Sources are known by their content, not by name or path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megastack.batch import IGNORED_LABEL
from megastack.data.order import Cursor, SampleOrder
from megastack.data.packing import Rows, Samples
from megastack.data.shares import parts
from megastack.errors import DataError
from megastack.random import stream_key

Int64s = npt.NDArray[np.int64]

PERIOD = 1 << 16
"""Entries after which the pattern of sources repeats; weights are rounded to whole shares of it."""


@dataclass(frozen=True)
class Stretch:
    """From entry `begin` of the endless stream on, sources are drawn by these weights, by the digest of each."""

    begin: int
    weights: Mapping[str, float]


History = tuple[Stretch, ...]


def continued(history: History, entry: int, weights: Mapping[str, float]) -> History:
    """The history of a run that goes on at `entry` with `weights`; the same one where they have not changed."""
    kept = tuple(stretch for stretch in history if stretch.begin < entry)
    return kept if kept and dict(kept[-1].weights) == dict(weights) else (*kept, Stretch(entry, dict(weights)))


def history_json(history: History) -> list[dict[str, Any]]:
    """The history as a checkpoint keeps it."""
    return [asdict(stretch) for stretch in history]


def history_of(record: Sequence[Mapping[str, Any]]) -> History:
    """The inverse of :func:`history_json`."""
    return tuple(Stretch(int(each["begin"]), dict(each["weights"])) for each in record)


def missing_sources(history: History, present: Mapping[str, float]) -> int:
    """How many sources of the history a run no longer has; one that is not drawn any more stays, with weight 0."""
    return len({digest for stretch in history for digest in stretch.weights} - set(present))


def shares(weights: Sequence[float]) -> Int64s:
    """Whole shares of a period by largest remainder; at least one for every weight above 0, however small."""
    ideal = np.asarray(parts(weights)) * PERIOD
    counts = np.where(np.asarray(weights) > 0, np.maximum(np.floor(ideal), 1), 0).astype(np.int64)
    missing = PERIOD - int(counts.sum())
    if missing > 0:
        counts[np.argsort(counts - ideal, kind="stable")[:missing]] += 1
    while missing < 0:  # what tiny weights have too much comes from the largest shares, which keep one
        largest = counts.argmax()
        taken = min(-missing, int(counts[largest]) - 1)
        counts[largest] -= taken
        missing += taken
    return counts


class BlendOrder:
    """The endless order over several sources, whose samples are numbered one source after the other.

    Args:
        counts: samples of each source, by its digest.
        history: what the weights were and are; see :func:`continued`.
        seed: decides the order within each source.
        taken: sources that were drawn from before the history begins; they go on where they were.
    """

    def __init__(
        self, counts: Mapping[str, int], history: History, seed: int, taken: Mapping[str, Cursor] | None = None
    ) -> None:
        before = {digest: (taken or {}).get(digest, Cursor(stream_key(seed, digest))) for digest in counts}
        self._before = before
        self._offsets = np.cumsum([0, *counts.values()], dtype=np.int64)
        self._orders = [SampleOrder(count, before[digest].seed) if count else None for digest, count in counts.items()]
        self._begins = np.array([stretch.begin for stretch in history], dtype=np.int64)
        consumed = np.array([each.draws for each in before.values()], dtype=np.int64)
        self._pieces: list[_Piece] = []
        for stretch, end in zip(history, [*(s.begin for s in history[1:]), None], strict=True):
            piece = _Piece([stretch.weights.get(digest, 0.0) for digest in counts], consumed)
            self._pieces.append(piece)
            if end is not None:
                consumed = piece.consumed(end - stretch.begin)

    def many(self, entries: Int64s) -> Int64s:
        """The sample at each of these entries."""
        sources, draws = self.draws(entries)
        samples = np.empty_like(draws)
        for source in np.unique(sources):
            chosen, order = sources == source, self._orders[source]
            assert order is not None, "a source without samples is not drawn"
            samples[chosen] = self._offsets[source] + order.many(draws[chosen])
        return samples

    def taken(self, entry: int) -> dict[str, Cursor]:
        """How far each source is drawn when `entry`, one after the last begin of the history, is the next."""
        draws = self._pieces[-1].consumed(entry - int(self._begins[-1]))
        return {
            digest: Cursor(before.seed, int(count))
            for (digest, before), count in zip(self._before.items(), draws, strict=True)
        }

    def draws(self, entries: Int64s) -> tuple[Int64s, Int64s]:
        """The source of each entry, and how often that source was drawn before it."""
        entries = np.asarray(entries, dtype=np.int64)
        sources, draws = np.empty_like(entries), np.empty_like(entries)
        which = self._begins.searchsorted(entries, "right") - 1
        for number in np.unique(which):
            chosen = which == number
            sources[chosen], draws[chosen] = self._pieces[number].draws(entries[chosen] - self._begins[number])
        return sources, draws


class _Piece:
    """A stretch of one weighting, by the number of its entries."""

    def __init__(self, weights: Sequence[float], before: Int64s) -> None:
        self._before, self._shares = before, shares(weights)
        source = np.repeat(np.arange(len(weights)), self._shares)
        turn = np.concatenate([np.arange(share) for share in self._shares])
        order = np.argsort((turn + 0.5) / self._shares[source], kind="stable")
        self._pattern, self._turns = source[order], turn[order]

    def draws(self, places: Int64s) -> tuple[Int64s, Int64s]:
        periods, rest = np.divmod(places, PERIOD)
        source = self._pattern[rest]
        return source, self._before[source] + periods * self._shares[source] + self._turns[rest]

    def consumed(self, entries: int) -> Int64s:
        """Draws of each source when the stretch has had this many entries."""
        periods, rest = divmod(entries, PERIOD)
        begun = np.bincount(self._pattern[:rest], minlength=len(self._shares))
        return self._before + periods * self._shares + begun


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


def check_weights(weights: Sequence[float], counts: Sequence[int]) -> None:
    """Raises :class:`DataError` where nothing is to be drawn, or something from a source without a training sample."""
    if not max(weights) > 0 or min(weights) < 0:
        raise DataError(f"data.blend: weights {list(weights)}; use weights of at least 0, one of them above 0")
    if (drawn := sum(weight > 0 for weight in weights)) > PERIOD:
        raise DataError(f"data.blend: {drawn:,} sources are drawn; use at most {PERIOD:,}, or several paths in one")
    for at, (weight, count) in enumerate(zip(weights, counts, strict=True)):
        if weight and not count:
            raise DataError(f"data.blend[{at}]: has no training sample; use more tokens, or weight 0")
