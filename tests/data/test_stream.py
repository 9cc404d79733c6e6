"""Token streams: width of ids, boundaries, and the two sides."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.data.split import held_out
from megastack.data.stream import id_type, stream_of, tokenize
from megastack.data.tokenizers import ByteTokenizer
from megastack.errors import DataError

DOCUMENTS = [f"text of document {number}".encode() for number in range(2500)]


@pytest.mark.parametrize(
    ("size", "width"), [(1, 1), (256, 1), (257, 2), (40_001, 2), (65_536, 2), (65_537, 4), (70_001, 4)]
)
def test_ids_are_kept_as_narrow_as_they_fit_and_exactly(size: int, width: int) -> None:
    ids = np.array([0, size - 1, size // 2])
    stream = stream_of([ids], size)
    assert stream.tokens.dtype.itemsize == width == id_type(size).itemsize
    assert stream.tokens.tolist() == ids.tolist()


@pytest.mark.parametrize("bad", [37, -5])
def test_ids_outside_are_refused_when_written(bad: int) -> None:
    with pytest.raises(DataError, match=rf"document 1 holds the id {bad}; ids run from 0 to 36"):
        stream_of([np.array([36, 0]), np.array([1, bad])], 37)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8))
def test_a_stream_is_its_documents_back_to_back(documents: list[list[int]]) -> None:
    stream = stream_of([np.array(document, dtype=np.int64) for document in documents], 10)
    kept = [document for document in documents if document]
    ends = stream.starts + stream.lengths
    assert [stream.tokens[a:b].tolist() for a, b in zip(stream.starts, ends, strict=True)] == kept
    assert stream.documents == len(kept)


def test_each_document_goes_to_its_side_in_corpus_order_with_its_end() -> None:
    tokenizer = ByteTokenizer()
    for side, stream in zip((False, True), tokenize(DOCUMENTS, tokenizer, 0.2), strict=True):
        expected = [document for document in DOCUMENTS if held_out(document, 0.2) is side]
        assert bytes(stream.tokens) == b"".join(document + b"\xff" for document in expected)
        assert stream.lengths.tolist() == [len(document) + 1 for document in expected]


def test_a_tokenizer_without_an_end_still_has_boundaries() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.end = None
    train, _ = tokenize([b"abc", b"de"], tokenizer, 0.0)
    assert bytes(train.tokens) == b"abcde"
    assert train.starts.tolist() == [0, 3]


def test_the_digest_sees_ids_and_boundaries_but_not_their_width() -> None:
    def digest(*documents: list[int], size: int = 10) -> str:
        return stream_of([np.array(document) for document in documents], size).digest()

    assert digest([1, 2], [3]) == digest([1, 2], [3], size=70_000)
    assert digest([1, 2], [3]) != digest([1], [2, 3])
    assert digest([1, 2], [3]) != digest([1, 2], [4])


def test_tokens_cannot_be_changed_by_whoever_holds_the_stream() -> None:
    for stream in (stream_of([np.array([1])], 2), tokenize([b"abc"], ByteTokenizer(), 0.0)[0]):
        with pytest.raises(ValueError, match="read-only"):
            stream.tokens[0] = 0
