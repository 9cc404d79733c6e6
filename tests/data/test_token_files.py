"""Finding token files, and checking their ids against a vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastack.data.token_files import ArrayFile, id_violations, open_token_files, pieces
from megastack.errors import DataError
from tests.data.token_cases import write_by_hand

FAR = [[1] * 70_000, [2, 3, 999, 4], [5] * 10]
"""A document with an invalid id after the tokens that a rank checks first."""


@dataclass(frozen=True)
class Huge:
    """A file of ones of any size, which records the ranges that were read."""

    tokens: int
    dtype: np.dtype = field(default_factory=lambda: np.dtype("i4"))
    name: str = "huge"
    boundaries: int = 1
    reads: list[tuple[int, int]] = field(default_factory=list)

    def read(self, begin: int, end: int) -> np.ndarray:
        self.reads.append((begin, end))
        return np.ones(end - begin, self.dtype)


def test_an_id_anywhere_in_a_file_is_found_with_its_position(tmp_path: Path) -> None:
    files = open_token_files([write_by_hand(tmp_path / "a", FAR, 8), write_by_hand(tmp_path / "b", [[1, 2]], 8)])
    (found,) = id_violations(files, 256)
    rule = f"token id 999 in {tmp_path / 'a'}, at token 70002, is outside the vocabulary"
    assert str(found) == f"model.vocab=256: {rule}; use 1000 or more"
    assert not id_violations(files, 1000)


@pytest.mark.parametrize("shape", [(-1,), (-1, 4)], ids=["running", "rows"])
@pytest.mark.parametrize("kind", ["i1", "i2", "i4", "i8"])
def test_ids_below_0_of_arrays_are_found(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "a.npy", np.array([0, 1, -3, 2, -1, 5, 0, 0], kind).reshape(shape))
    (found,) = id_violations([ArrayFile(tmp_path / "a.npy")], 100)
    assert str(found).startswith(f"data.paths={tmp_path}/a.npy: token id -3 at token 2 is below 0; use")


def test_an_array_with_ids_too_large_and_below_0_has_two_errors(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([0, 2**40, -1], "i8"))
    large, negative = id_violations([ArrayFile(tmp_path / "a.npy")], 100)
    assert (large.key, large.legal, negative.key) == ("model.vocab", ("other token files",), "data.paths")


def test_a_file_whose_id_type_fits_in_the_vocabulary_is_not_read() -> None:
    file = Huge(10**11, np.dtype("u2"))
    assert not id_violations([file], 65_536) and not file.reads
    id_violations([file], 65_535)
    assert file.reads


def test_reads_of_a_large_file_are_bounded_and_spread_over_it() -> None:
    large, small = Huge(10**11), Huge(1000)
    assert not id_violations([large, small], 256, limit=1 << 20)
    assert small.reads == [(0, 1000)]
    assert sum(end - begin for begin, end in large.reads) <= 1 << 20
    assert large.reads[0][0] == 0 and large.reads[-1][1] == 10**11
    assert max(np.diff([begin for begin, _ in large.reads])) < 10**11 / 13


def test_the_record_beside_a_large_file_counts_if_its_token_count_matches(tmp_path: Path) -> None:
    files = open_token_files([write_by_hand(tmp_path / "a", [[1] * 200_000], 8)])
    record = tmp_path / "a.json"
    record.write_text(json.dumps({"largest_id": 999, "tokens": 200_000}))
    (found,) = id_violations(files, 256, limit=1 << 16)
    assert str(found).startswith("model.vocab=256: token id 999 in") and "recorded in" in str(found)
    assert not id_violations(files, 256), "a file that is read whole needs no record"
    record.write_text(json.dumps({"largest_id": 999, "tokens": 5}))
    assert not id_violations(files, 256, limit=1 << 16)


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_pieces_are_disjoint_and_within_the_file_and_the_limit(tokens: int, limit: int) -> None:
    found = list(pieces(tokens, limit))
    assert all(0 <= begin < end <= tokens for begin, end in found)
    assert all(a[1] <= b[0] for a, b in pairwise(found))
    total = sum(end - begin for begin, end in found)
    assert total == tokens if limit >= tokens else total <= max(limit, 1 << 16)


def test_prefixes_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b", "a.v1"):
        write_by_hand(tmp_path / "x", [[1]], 8)
        (tmp_path / "x.bin").rename(tmp_path / f"{name}.bin")
        (tmp_path / "x.idx").rename(tmp_path / f"{name}.idx")
    names = [[tmp_path], [tmp_path / "*.idx"], [tmp_path / "a.v1.bin", tmp_path / "b.idx"]]
    names.append([tmp_path / "a.v1", tmp_path / "b"])
    for paths in names:
        assert [Path(file.name).name for file in open_token_files(paths)] == ["a.v1", "b"]


def test_files_that_are_not_token_files_are_rejected(tmp_path: Path) -> None:
    np.save(tmp_path / "f.npy", np.zeros(3))
    write_by_hand(tmp_path / "none", [], 8)
    (tmp_path / "empty").mkdir()
    twice = [tmp_path / "none", tmp_path / "none.bin"]
    cases = {"integers": [tmp_path / "f.npy"], "has no tokens": [tmp_path / "none"], "named twice": twice}
    cases |= {"without .idx": [tmp_path / "empty"], "does not exist": [tmp_path / "gone"], r"paths=\[\]": []}
    for message, paths in cases.items():
        with pytest.raises(DataError, match=message):
            open_token_files(paths)
