"""The `.bin/.idx` format against an independent reader and writer."""

import pickle
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megastack.data.indexed import IndexedFile, IndexedWriter, id_dtype
from megastack.errors import DataError
from tests.data.token_cases import read_by_hand, write_by_hand

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


def written(prefix: Path, documents: list[list[int]], dtype: object) -> Path:
    with IndexedWriter(prefix, dtype) as out:
        for document in documents:
            out.add(np.array(document, dtype=np.int64))
    return prefix


def documents_of(file: IndexedFile) -> list[list[int]]:
    starts = [*file.starts(0, file.tokens), file.tokens]
    return [file.read(a, b).tolist() for a, b in pairwise(starts)]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("sentences", [1, 3])
def test_every_width_is_read_and_sentences_make_documents(tmp_path: Path, code: int, sentences: int) -> None:
    file = IndexedFile(write_by_hand(tmp_path / "c", DOCUMENTS, code, sentences=sentences))
    assert (file.tokens, file.documents) == (11, 4)
    assert documents_of(file) == DOCUMENTS
    assert [file.next_boundary(at) for at in range(13)] == [0, 3, 3, 3, 4, 9, 9, 9, 9, 9, 11, 11, 11]
    assert file.starts(1, 9).tolist() == [3, 4] and file.count(3, 10) == 3


@pytest.mark.parametrize(("largest", "code"), [(255, 8), (40_000, 8), (65_535, 8), (65_536, 4), (70_000, 4)])
def test_ids_beyond_sixteen_bits_round_trip(tmp_path: Path, largest: int, code: int) -> None:
    documents = [[0, largest], [40_000 % (largest + 1), 7]]
    prefix = written(tmp_path / "c", documents, id_dtype(largest))
    assert read_by_hand(prefix) == (code, documents)
    assert documents_of(IndexedFile(prefix)) == documents


def test_an_id_that_the_type_cannot_hold_is_rejected_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot hold"):
        written(tmp_path / "c", [[70_000]], np.uint16)
    with pytest.raises(DataError, match="cannot hold"):
        written(tmp_path / "c", [[-5]], np.uint16)
    assert list(tmp_path.iterdir()) == []


def test_empty_files_and_empty_documents(tmp_path: Path) -> None:
    assert IndexedFile(written(tmp_path / "none", [], np.uint16)).tokens == 0
    file = IndexedFile(written(tmp_path / "some", [[], [1, 2], [], [3], []], np.int32))
    assert (file.documents, file.starts(0, 3).tolist()) == (5, [0, 2])


def test_another_process_maps_the_file_itself(tmp_path: Path) -> None:
    file = IndexedFile(written(tmp_path / "c", [[1] * 10_000], np.int32))
    packed = pickle.dumps(file)
    assert len(packed) < 500 and pickle.loads(packed).read(0, 3).tolist() == [1, 1, 1]


def test_megatron_reads_our_files_and_the_reverse(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs = indexed.IndexedDataset(str(written(tmp_path / "ours", DOCUMENTS, np.uint16)))
    assert [theirs[at].tolist() for at in range(len(theirs))] == DOCUMENTS
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    for document in DOCUMENTS:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert documents_of(IndexedFile(tmp_path / "theirs")) == DOCUMENTS


def damaged(prefix: Path, suffix: str, change: object) -> str:
    path = prefix.with_suffix(suffix)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError) as caught:
        IndexedFile(prefix)
    return str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".bin", lambda raw: raw[:-4], "18 bytes, but .* describes 22"),
        (".bin", lambda raw: raw[:-1], "not a multiple of the size of uint16 ids"),
        (".bin", lambda raw: raw + b"xx", "24 bytes, but .* describes 22"),
        (".idx", lambda raw: b"PK" + raw[2:], "not an MMIDIDX index"),
        (".idx", lambda raw: raw[:20], "not an MMIDIDX index"),
        (".idx", lambda raw: raw[:-8], "but its header describes"),
        (".idx", lambda raw: raw[:9] + b"\x02" + raw[10:], "version 2"),
        (".idx", lambda raw: raw[:17] + b"\x06" + raw[18:], "type 6"),
        (".idx", lambda raw: raw[:34] + b"\x09" + raw[35:], "sequence 0 is not adjacent"),
        (".idx", lambda raw: raw[:-8] + bytes(8), "documents do not cover its 4 sequences"),
    ],
)
def test_damage_is_named(tmp_path: Path, suffix: str, change: object, message: str) -> None:
    prefix = written(tmp_path / "c", DOCUMENTS, np.uint16)
    assert re.search(message, damaged(prefix, suffix, change))


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    prefix = written(tmp_path / "c", DOCUMENTS, np.uint16)
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"c\.bin: does not exist"):
        IndexedFile(prefix)
