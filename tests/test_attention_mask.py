"""Attention masks as values: the pairs they allow, and the kernel calls that compute them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack import attention_mask
from megastack.attention_mask import CALL, AttentionMask, Span

ROWS = np.array([[0, 0, 0, 1, 1, 2], [4, 7, 7, 7, 7, 7], [0, 0, 0, 0, 0, 0]])


def visible(documents_BS: np.ndarray, queries: Span, keys: Span, *, causal: bool) -> np.ndarray:
    """The pairs of a mask by its definition, (B, queries, keys)."""
    same = documents_BS[:, slice(*queries), None] == documents_BS[:, None, slice(*keys)]
    return same & np.tri(same.shape[1], same.shape[2], dtype=bool) if causal else same


def test_every_row_begins_a_document():
    mask = AttentionMask.of(ROWS)
    assert mask.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 12, 18] and mask.cu_seqlens.dtype == np.int32
    assert mask.max_seqlen == 6 and mask.covers_rows and mask.has_boundaries
    assert not AttentionMask.of(np.zeros((3, 5), dtype=np.int64)).has_boundaries


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_span_has_its_part_of_every_document(data):
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 12))
    documents_BS = np.cumsum(data.draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length)))
    documents_BS = documents_BS.reshape(rows, length)
    cut = data.draw(st.integers(1, length - 1))
    whole, first, rest = AttentionMask.of(documents_BS), Span(0, cut), Span(cut, length)
    parts = [(first, first, True), (rest, rest, True), (rest, first, False)]
    counted = 0
    for queries, keys, causal in parts:
        mask = AttentionMask(whole.cu_seqlens, rows, queries, keys, causal)
        assert mask.query_lengths.sum() == rows * (queries.stop - queries.start)
        assert mask.pairs == visible(documents_BS, queries, keys, causal=causal).sum()
        counted += mask.pairs
    assert counted == whole.pairs == visible(documents_BS, Span(0, length), Span(0, length), causal=True).sum()


def calls(lengths: list[int], width: int | None) -> list[tuple[int, int, int]]:
    documents_BS = np.repeat(np.arange(len(lengths)), lengths)[None]
    mask = AttentionMask.of(documents_BS)
    segments = mask.segments(width)
    assert segments is mask.segments(width), "grouped once"
    covered = [i for segment in segments for i in range(segment.start, segment.start + segment.tokens)]
    assert covered == list(range(sum(lengths)))
    for segment in segments:
        if segment.documents is not None:
            part = slice(segment.start, segment.start + segment.length)
            expected = visible(documents_BS[:, part], *(Span(0, segment.length),) * 2, causal=True)
            assert np.array_equal(~segment.hidden, expected[0])
    return [(segment.batch, segment.length, segment.pairs) for segment in segments]


def test_documents_of_equal_length_are_a_batch_and_short_ones_share_a_masked_call():
    assert calls([5, 5, 5, 3, 2], None) == [(3, 5, 75), (1, 3, 9), (1, 2, 4)]
    assert calls([5, 5, 5, 3, 2], 8) == [(3, 5, 75), (1, 5, 25)]
    assert calls([3, 2, 4, 4, 1], 8) == [(1, 5, 25), (2, 4, 32), (1, 1, 1)]


@pytest.mark.parametrize("width", [64, 512, 4096])
def test_a_document_takes_a_call_of_its_own_where_hidden_pairs_cost_more(width):
    size = int((CALL // width / 2) ** 0.5)
    assert len(calls([size, size - 1], width)) == 1
    assert len(calls([size + 1, size + 2], width)) == 2


def test_documents_of_typical_length_are_computed_one_by_one(monkeypatch):
    lengths = [64, 128, 96, 100, 124]
    assert sum(pairs for *_, pairs in calls(lengths, 512)) == sum(n * n for n in lengths)
    monkeypatch.setattr(attention_mask, "CALL", 10**9)
    assert len(calls(lengths, 512)) == 1
