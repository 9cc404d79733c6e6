"""Samples against a reference that goes token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.batch import IGNORED_LABEL
from megastack.data.packing import PADDING_ID, PackedSamples, Rows, SingleSamples, check_rows, padded
from megastack.data.stream import TokenStream, stream_of
from megastack.errors import DataError

VOCAB = 50
corpora = st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=8)


def stream(documents: list[list[int]]) -> TokenStream:
    return stream_of([np.array(document) for document in documents], VOCAB)


def all_rows(samples: PackedSamples | SingleSamples) -> Rows:
    return samples.rows(np.arange(len(samples)))


@settings(deadline=None, max_examples=60)
@given(corpora, st.integers(1, 7), st.booleans())
def test_packed_samples_equal_a_walk_over_the_tokens(documents: list[list[int]], size: int, mask: bool) -> None:
    flat = [(token, d) for d, document in enumerate(documents) for token in document]
    samples = PackedSamples(stream(documents), size, document_mask=mask)
    assert len(samples) == max(0, (len(flat) - 1) // size)
    if not len(samples):
        return
    rows = all_rows(samples)
    assert (rows.documents_BS is None) is not mask
    for i in range(len(samples)):
        inputs, targets = flat[i * size : (i + 1) * size], flat[i * size + 1 : (i + 1) * size + 1]
        assert rows.tokens_BS[i].tolist() == [token for token, _ in inputs]
        joined = [not mask or a[1] == b[1] for a, b in zip(inputs, targets, strict=True)]
        expected = [b[0] if same else IGNORED_LABEL for b, same in zip(targets, joined, strict=True)]
        assert rows.labels_BS[i].tolist() == expected
        assert samples.valid_tokens(np.array([i]))[0] == sum(joined)
        of_document = [d if mask else 0 for _, d in inputs]
        assert rows.positions_BS[i].tolist() == [k - of_document.index(d) for k, d in enumerate(of_document)]
        if rows.documents_BS is not None:
            assert rows.documents_BS[i].tolist() == [d - of_document[0] for d in of_document]


@settings(deadline=None, max_examples=60)
@given(corpora, st.integers(1, 7))
def test_every_token_is_a_label_once_except_the_unused_end(documents: list[list[int]], size: int) -> None:
    samples = PackedSamples(stream(documents), size, document_mask=False)
    flat = [token for document in documents for token in document]
    used = len(flat) - samples.unused
    if len(samples):
        assert all_rows(samples).labels_BS.ravel().tolist() == flat[1:used]
        assert samples.unused < size
    else:
        assert used == 0


@settings(deadline=None, max_examples=60)
@given(corpora, st.integers(1, 7))
def test_single_samples_hold_one_document_each_and_predict_all_of_it(documents: list[list[int]], size: int) -> None:
    samples = SingleSamples(stream(documents), size)
    pieces = [(doc[at : at + size + 1]) for doc in documents for at in range(0, len(doc) - 1, size)]
    assert len(samples) == len(pieces)
    rows = all_rows(samples)
    assert rows.documents_BS is None
    for i, piece in enumerate(pieces):
        valid, rest = len(piece) - 1, size - (len(piece) - 1)
        assert rows.labels_BS[i].tolist() == piece[1:] + [IGNORED_LABEL] * rest
        assert rows.tokens_BS[i, :valid].tolist() == piece[:-1]
        assert rows.positions_BS[i].tolist() == list(range(size))
        assert samples.valid_tokens(np.array([i]))[0] == valid


def test_no_label_links_the_end_of_a_document_to_the_start_of_the_next() -> None:
    """Documents of 5 and 3 tokens in one row, with no end ids among the inputs."""
    samples = PackedSamples(stream([[1, 2, 3, 4, 5], [6, 7, 8], [9]]), 8)
    rows = all_rows(samples)
    assert rows.labels_BS.tolist() == [[2, 3, 4, 5, IGNORED_LABEL, 7, 8, IGNORED_LABEL]]
    assert rows.positions_BS.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert rows.documents_BS is not None and rows.documents_BS.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize(
    "samples", [PackedSamples(stream([[1, 2, 3, 4], [5, 6]]), 2), SingleSamples(stream([[1, 2]]), 4)]
)
def test_rows_come_in_the_requested_order_as_int64_copies(samples: PackedSamples | SingleSamples) -> None:
    again = samples.rows(np.array([0, 0]))
    assert again.tokens_BS[0].tolist() == again.tokens_BS[1].tolist()
    for array in (again.tokens_BS, again.labels_BS, again.positions_BS):
        assert array.dtype == np.int64 and array.flags.c_contiguous and array.flags.writeable
    reordered = samples.rows(np.arange(len(samples))[::-1].copy())
    assert reordered.tokens_BS[::-1].tolist() == all_rows(samples).tokens_BS.tolist()


@pytest.mark.parametrize("mask", [True, False])
def test_padding_rows_have_no_labels(mask: bool) -> None:
    rows = all_rows(PackedSamples(stream([[1, 2, 3], [4, 5]]), 2, document_mask=mask))
    more = padded(rows, 5)
    assert more.tokens_BS[:2].tolist() == rows.tokens_BS.tolist()
    assert (more.tokens_BS[2:] == PADDING_ID).all() and (more.labels_BS[2:] == IGNORED_LABEL).all()
    assert more.positions_BS[2:].tolist() == [[0, 1]] * 3
    assert (more.documents_BS is None) is not mask
    assert padded(rows, 2) is rows


def batch(tokens: list[int], labels: list[int]) -> Rows:
    return Rows(np.array([[0, 0], tokens]), np.array([[0, 0], labels]), np.zeros((2, 2), dtype=np.int64), None)


@pytest.mark.parametrize("bad", [37, -5, 127])
def test_ids_outside_the_vocabulary_are_rejected_as_token_and_as_label(bad: int) -> None:
    """127 has a row in an embedding that is padded to 128 rows, and is still not a legal id."""
    check_rows(batch([36, 0], [36, IGNORED_LABEL]), 37, np.array([7, 9]))
    with pytest.raises(DataError, match=rf"token id {bad} in sample 9 at position 1: outside model.vocab=37"):
        check_rows(batch([36, bad], [36, 0]), 37, np.array([7, 9]))
    with pytest.raises(DataError, match=rf"label id {bad} in sample 9 at position 0: outside model.vocab=37"):
        check_rows(batch([36, 0], [bad, 0]), 37, np.array([7, 9]))


@pytest.mark.parametrize(("kind", "sample"), [(PackedSamples, 2), (SingleSamples, 2)])
def test_samples_find_any_id_outside_the_vocabulary(kind: type, sample: int) -> None:
    samples = kind(stream([[1, 2, 3, 4, 5], [37, 7, 8]]), 2)
    samples.check_ids(38)
    with pytest.raises(DataError, match=rf"token id 37 in sample {sample}: outside model.vocab=37"):
        samples.check_ids(37)
