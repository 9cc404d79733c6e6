"""Splits and samples of token files against the same documents held in memory, and of a corpus that is not there."""

import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.data.loader import Loader
from megastack.data.packing import PackedSamples
from megastack.data.spans import Span, SpanStream, split_file
from megastack.data.stream import stream_of
from megastack.data.token_files import ArrayFile, open_token_files
from megastack.errors import DataError
from tests.data.token_cases import write_by_hand


@dataclass(frozen=True)
class Endless:
    """A file that computes what it holds: documents of 1,000 tokens, each token a function of its place."""

    tokens: int
    name: str = "endless"

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("i4")

    @property
    def places(self) -> int:
        return self.tokens // 1000

    def read(self, begin: int, end: int) -> np.ndarray:
        return (np.arange(begin, end) % 251).astype(self.dtype)

    def starts(self, begin: int, end: int) -> np.ndarray:
        return np.arange(-(-begin // 1000) * 1000, end, 1000, dtype=np.int64)

    def count(self, begin: int, end: int) -> int:
        return -(-end // 1000) - -(-begin // 1000)

    def cut(self, place: int) -> int:
        return min(self.tokens, -(-place // 1000) * 1000)


def corpus(tmp_path: Path, documents: list[list[int]], name: str = "c") -> SpanStream:
    [file] = open_token_files([write_by_hand(tmp_path / name, documents, 8)])
    return SpanStream([Span(file, 0, file.tokens)])


some = st.lists(st.lists(st.integers(1, 49), min_size=1, max_size=9), min_size=2, max_size=9)


@settings(deadline=None, max_examples=40)
@given(some, st.integers(1, 6), st.booleans(), st.integers(1, 3))
def test_samples_of_files_equal_those_of_the_documents_in_memory(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], size: int, mask: bool, files: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    groups = [documents[at::files] for at in range(min(files, len(documents)))]
    prefixes = [write_by_hand(folder / str(at), group, 4) for at, group in enumerate(groups)]
    stream = SpanStream([Span(file, 0, file.tokens) for file in open_token_files(prefixes)])
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
    sides = [{int(i) for span in side for i in file.read(span.begin, span.end)} for side in (train, held)]
    assert sides[0] | sides[1] == set(range(2000)) and not sides[0] & sides[1]
    share = sum(span.end - span.begin for span in held) / file.tokens
    assert abs(share - fraction) < 0.01
    assert split_file(file, 0)[1] == []


def test_one_document_is_not_split(tmp_path: Path) -> None:
    [file] = open_token_files([write_by_hand(tmp_path / "c", [[1] * 500], 8)])
    train, held = split_file(file, 0.05)
    assert ([s.end for s in train], held) == ([500], [])


def test_ten_billion_samples_take_no_memory() -> None:
    length = 1024
    train, held = split_file(Endless(10_600_000_000 * length), 0.05)
    tracemalloc.start()
    samples = PackedSamples(SpanStream(train), length)
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


def test_opening_reads_next_to_nothing(tmp_path: Path) -> None:
    prefix = write_by_hand(tmp_path / "c", [[1, 2, 3, 4]] * 200_000, 8)
    tracemalloc.start()
    [file] = open_token_files([prefix])
    PackedSamples(SpanStream(split_file(file, 0.05)[0]), 64).rows(np.arange(3))
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
    whole = SpanStream([Span(second, 0, 120)])
    assert whole.documents == 20
    assert PackedSamples(whole, 10).rows(np.arange(1)).documents_BS.tolist() == [[0] * 6 + [1] * 4]
    apart = PackedSamples(SpanStream([Span(first, 0, 4), Span(first, 90, 99)]), 8).rows(np.arange(1))
    assert apart.documents_BS.tolist() == [[0] * 4 + [1] * 4]  # what lies apart in the file is no running text
    assert apart.labels_BS.tolist() == [[1, 2, 3, -100, 91, 92, 93, 94]]
    assert SpanStream(train).documents == 1 and isinstance(first, ArrayFile)


def test_prefixes_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b", "a.v1"):
        write_by_hand(tmp_path / "x", [[1]], 8)
        (tmp_path / "x.bin").rename(tmp_path / f"{name}.bin")
        (tmp_path / "x.idx").rename(tmp_path / f"{name}.idx")
    names = [[tmp_path], [tmp_path / "*.idx"], [tmp_path / "a.v1.bin", tmp_path / "b.idx"]]
    names.append([tmp_path / "a.v1", tmp_path / "b"])
    for paths in names:
        assert [Path(file.name).name for file in open_token_files(paths)] == ["a.v1", "b"]


def test_what_is_no_token_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.zeros(3))
    write_by_hand(tmp_path / "none", [], 8)
    (tmp_path / "empty").mkdir()
    twice = [tmp_path / "none", tmp_path / "none.bin"]
    cases = {"whole numbers": [tmp_path / "f.npy"], "holds no token": [tmp_path / "none"], "named twice": twice}
    cases |= {"without .idx": [tmp_path / "empty"], "does not exist": [tmp_path / "gone"], r"paths=\[\]": []}
    for message, paths in cases.items():
        with pytest.raises(DataError, match=message):
            open_token_files(paths)


def test_an_id_outside_the_vocabulary_is_named_alike_at_once(tmp_path: Path) -> None:
    for code, bad in ((8, 37), (4, -5)):
        samples = PackedSamples(corpus(tmp_path, [[1, 36, 2]] * 3), 2)
        Loader(samples, global_size=1, micro_size=1, vocab=37)
        [file] = open_token_files([write_by_hand(tmp_path / "bad", [[1, 36], [3, bad]], code)])
        samples = PackedSamples(SpanStream([Span(file, 0, 4)]), 2)
        with pytest.raises(DataError, match=f"token id {bad} in .*bad at token 3: outside model.vocab=37"):
            Loader(samples, global_size=1, micro_size=1, vocab=37)
