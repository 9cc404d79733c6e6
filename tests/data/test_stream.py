"""Streams of text and of token files: ids, boundaries, and the split into training and validation."""

import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.data.loader import Loader
from megastack.data.packing import PackedSamples
from megastack.data.stream import (
    FileStream,
    TokenRange,
    check_fraction,
    held_out,
    narrowest_dtype,
    split_file,
    stream_of,
    tokenize,
)
from megastack.data.token_files import ArrayFile, open_token_files
from megastack.data.tokenizers import ByteTokenizer
from megastack.errors import DataError
from tests.data.token_cases import write_by_hand

DOCUMENTS = [f"text of document {number}".encode() for number in range(2500)]


@pytest.mark.parametrize(
    ("size", "width"), [(1, 1), (256, 1), (257, 2), (40_001, 2), (65_536, 2), (65_537, 4), (70_001, 4)]
)
def test_ids_are_kept_as_narrow_as_they_fit_and_exactly(size: int, width: int) -> None:
    ids = np.array([0, size - 1, size // 2])
    stream = stream_of([ids], size)
    assert stream.tokens.dtype.itemsize == width == narrowest_dtype(size).itemsize
    assert stream.tokens.tolist() == ids.tolist()


@pytest.mark.parametrize("bad", [37, -5])
def test_ids_outside_the_vocabulary_are_rejected_when_written(bad: int) -> None:
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


def test_each_document_goes_to_its_split_in_corpus_order_with_its_end() -> None:
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


def test_the_digest_depends_on_ids_and_boundaries_but_not_on_width() -> None:
    def digest(*documents: list[int], size: int = 10) -> str:
        return stream_of([np.array(document) for document in documents], size).digest()

    assert digest([1, 2], [3]) == digest([1, 2], [3], size=70_000)
    assert digest([1, 2], [3]) != digest([1], [2, 3])
    assert digest([1, 2], [3]) != digest([1, 2], [4])


def test_the_tokens_of_a_stream_are_read_only() -> None:
    for stream in (stream_of([np.array([1])], 2), tokenize([b"abc"], ByteTokenizer(), 0.0)[0]):
        with pytest.raises(ValueError, match="read-only"):
            stream.tokens[0] = 0


SPLIT_DOCUMENTS = [f"document {number}".encode() for number in range(4000)]
EXPECTED_SPLIT = [True, True, True, False, False, False, True, True]


@pytest.mark.parametrize("fraction", [0.05, 0.5])
def test_about_the_fraction_is_held_out(fraction: float) -> None:
    assert sum(held_out(d, fraction) for d in SPLIT_DOCUMENTS) / len(SPLIT_DOCUMENTS) == pytest.approx(
        fraction, abs=0.02
    )


def test_a_larger_fraction_only_adds_documents() -> None:
    assert not any(held_out(document, 0.0) for document in SPLIT_DOCUMENTS)
    assert all(held_out(document, 0.3) for document in SPLIT_DOCUMENTS if held_out(document, 0.1))


def test_the_split_depends_on_the_document_alone() -> None:
    """Recorded, so that a change of the hash, which would move old validation text into training, is noticed."""
    assert [held_out(document, 0.5) for document in SPLIT_DOCUMENTS[:8]] == EXPECTED_SPLIT


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fractions_that_leave_no_training_are_rejected(fraction: float) -> None:
    with pytest.raises(DataError, match=r"data.validation_fraction="):
        check_fraction(fraction)


@dataclass(frozen=True)
class ComputedFile:
    """A file of computed documents of 1,000 tokens, each token a function of its position."""

    tokens: int
    name: str = "computed"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("i4")

    @property
    def boundaries(self) -> int:
        return self.tokens // 1000

    def read(self, begin: int, end: int) -> np.ndarray:
        return (np.arange(begin, end) % 251).astype(self.dtype)

    def starts(self, begin: int, end: int) -> np.ndarray:
        return np.arange(-(-begin // 1000) * 1000, end, 1000, dtype=np.int64)

    def count(self, begin: int, end: int) -> int:
        return -(-end // 1000) - -(-begin // 1000)

    def next_boundary(self, position: int) -> int:
        return min(self.tokens, -(-position // 1000) * 1000)


def corpus(tmp_path: Path, documents: list[list[int]], name: str = "c") -> FileStream:
    [file] = open_token_files([write_by_hand(tmp_path / name, documents, 8)])
    return FileStream([TokenRange(file, 0, file.tokens)])


some = st.lists(st.lists(st.integers(1, 49), min_size=1, max_size=9), min_size=2, max_size=9)


@settings(deadline=None, max_examples=40)
@given(some, st.integers(1, 6), st.booleans(), st.integers(1, 3))
def test_samples_of_files_equal_samples_of_documents_in_memory(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], size: int, mask: bool, files: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    groups = [documents[at::files] for at in range(min(files, len(documents)))]
    prefixes = [write_by_hand(folder / str(at), group, 4) for at, group in enumerate(groups)]
    stream = FileStream([TokenRange(file, 0, file.tokens) for file in open_token_files(prefixes)])
    ordered = [np.array(document) for group in groups for document in group]
    kept, read = (PackedSamples(s, size, document_mask=mask) for s in (stream_of(ordered, 50), stream))
    assert (len(kept), kept.unused, stream.documents) == (len(read), read.unused, len(documents))
    chosen = np.arange(len(kept))[::-1]
    assert kept.valid_tokens(chosen).tolist() == read.valid_tokens(chosen).tolist()
    for name in ("tokens_BS", "labels_BS", "positions_BS", "documents_BS"):
        expected, found = getattr(kept.rows(chosen), name), getattr(read.rows(chosen), name)
        assert (expected is None and found is None) or np.array_equal(expected, found), name


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.5])
def test_a_file_is_held_out_in_blocks_of_whole_documents(tmp_path: Path, fraction: float) -> None:
    rng = np.random.default_rng(0)
    documents = [[number] * int(rng.integers(1, 30)) for number in range(2000)]
    [file] = open_token_files([write_by_hand(tmp_path / "c", documents, 4)])
    train, held = split_file(file, fraction)
    assert len(held) == min(64, int(2000 * fraction / 4))
    splits = [{int(i) for each in split for i in file.read(each.begin, each.end)} for split in (train, held)]
    assert splits[0] | splits[1] == set(range(2000)) and not splits[0] & splits[1]
    share = sum(each.end - each.begin for each in held) / file.tokens
    assert abs(share - fraction) < 0.01
    assert split_file(file, 0)[1] == []


def test_one_document_is_not_split(tmp_path: Path) -> None:
    [file] = open_token_files([write_by_hand(tmp_path / "c", [[1] * 500], 8)])
    train, held = split_file(file, 0.05)
    assert ([s.end for s in train], held) == ([500], [])


def test_ten_billion_samples_take_no_memory() -> None:
    length = 1024
    train, held = split_file(ComputedFile(10_600_000_000 * length), 0.05)
    tracemalloc.start()
    samples = PackedSamples(FileStream(train), length)
    loader = Loader(samples, global_size=8, micro_size=2, dp_rank=1, dp_size=2, seed=3, vocab=251)
    microbatches = [m for step in (0, 1, 10**9) for m in loader.step(step)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(samples) > 10**10 and len(held) == 64
    assert peak < 4_000_000
    for microbatch in microbatches:
        tokens, labels = microbatch.tokens_BS, microbatch.labels_BS
        joined = labels >= 0
        assert ((tokens + 1) % 251 == labels)[joined].all() and 0 < (~joined).sum() <= 2 * tokens.shape[0]
    assert loader.sample_numbers(10**9).max() > 10**9


def test_opening_reads_almost_nothing(tmp_path: Path) -> None:
    prefix = write_by_hand(tmp_path / "c", [[1, 2, 3, 4]] * 200_000, 8)
    tracemalloc.start()
    [file] = open_token_files([prefix])
    PackedSamples(FileStream(split_file(file, 0.05)[0]), 64).rows(np.arange(3))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000  # the index alone has 4 MB


def test_arrays_of_one_and_two_dims(tmp_path: Path) -> None:
    flat, rows = tmp_path / "flat.npy", tmp_path / "rows.npy"
    np.save(flat, np.arange(100_000, dtype=np.uint32))
    np.save(rows, np.arange(120, dtype=np.int16).reshape(20, 6))
    [first], [second] = open_token_files([flat]), open_token_files([rows])
    train, held = split_file(first, 0.25)
    assert len(held) == 1 and sum(s.end - s.begin for s in held) == 25_000
    whole = FileStream([TokenRange(second, 0, 120)])
    assert whole.documents == 20
    assert PackedSamples(whole, 10).rows(np.arange(1)).documents_BS.tolist() == [[0] * 6 + [1] * 4]
    apart = PackedSamples(FileStream([TokenRange(first, 0, 4), TokenRange(first, 90, 99)]), 8).rows(np.arange(1))
    assert apart.documents_BS.tolist() == [
        [0] * 4 + [1] * 4
    ]  # ranges that are not adjacent in the file are separate documents
    assert apart.labels_BS.tolist() == [[1, 2, 3, -100, 91, 92, 93, 94]]
    assert FileStream(train).documents == 1 and isinstance(first, ArrayFile)


def test_an_id_outside_the_vocabulary_is_named_before_training(tmp_path: Path) -> None:
    for code, bad in ((8, 37), (4, -5)):
        samples = PackedSamples(corpus(tmp_path, [[1, 36, 2]] * 3), 2)
        Loader(samples, global_size=1, micro_size=1, vocab=37)
        [file] = open_token_files([write_by_hand(tmp_path / "bad", [[1, 36], [3, bad]], code)])
        samples = PackedSamples(FileStream([TokenRange(file, 0, 4)]), 2)
        with pytest.raises(DataError, match=f"token id {bad} in .*bad at token 3: outside model.vocab=37"):
            Loader(samples, global_size=1, micro_size=1, vocab=37)
