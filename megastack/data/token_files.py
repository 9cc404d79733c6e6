"""Token files for `data.source=bin`: finding them, their interface for samples, and the check of their ids.

A file is accessed at random and never read completely. It reports where documents begin within a range, so neither
opening it nor cutting samples from it takes time that grows with the corpus.

The check of ids before a run reads a bounded number of tokens, however large the files are. A file whose id type fits
in the vocabulary is not read. A file within the bound is read completely, so the result is exact. A larger file is read
in evenly spread pieces, together with the largest id that ``megastack tokenize`` recorded. An invalid id in any other
sample is found when that sample is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastack.data.indexed import IndexedFile
from megastack.errors import DataError, Violation

Ids = npt.NDArray[np.integer]
Int64s = npt.NDArray[np.int64]

LARGEST_VOCAB = 1 << 31
"""The largest `model.vocab`."""

MAX_TOKENS_READ = 1 << 28
"""The maximum number of tokens that the check of ids reads, over all files: about a gigabyte of four-byte ids."""

_SUFFIXES = (".idx", ".npy")
_BOUNDARY_TOKENS = 4096  # between two boundaries of an array without documents
_PIECE_TOKENS = 1 << 16


class TokenFile(Protocol):
    """Tokens with random access, and where documents begin among them.

    A boundary is a position at which the file may be divided between the splits.
    """

    @property
    def name(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    @property
    def boundaries(self) -> int:
        """The number of boundaries."""

    @property
    def dtype(self) -> np.dtype[np.integer]: ...

    def read(self, begin: int, end: int) -> Ids:
        """The ids of the tokens in [`begin`, `end`)."""

    def starts(self, begin: int, end: int) -> Int64s:
        """The positions in [`begin`, `end`) at which a document begins, each once, ascending."""

    def count(self, begin: int, end: int) -> int:
        """The number of documents that begin in [`begin`, `end`)."""

    def next_boundary(self, position: int) -> int:
        """The first boundary at or after `position`; the end of the file if there is none."""


class ArrayFile:
    """A `.npy` array of ids: two dims hold one document per row; one dim is running text with boundaries anywhere."""

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"data.paths={path}: cannot be read as an array ({error}); use a .npy file") from error
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
            raise DataError(f"{path}: {array.dtype}{list(array.shape)}; use integers in one or two dims")
        self._ids: Ids = array.reshape(-1)
        self._row = array.shape[1] if array.ndim == 2 else 0
        self.tokens, self.dtype = len(self._ids), array.dtype
        self.boundaries = self.tokens // (self._row or _BOUNDARY_TOKENS)

    def __reduce__(self) -> tuple[type[ArrayFile], tuple[str]]:
        return ArrayFile, (self.name,)

    def read(self, begin: int, end: int) -> Ids:
        return self._ids[begin:end]

    def starts(self, begin: int, end: int) -> Int64s:
        if not self._row:
            return np.arange(1 if begin == 0 < end else 0, dtype=np.int64)
        return np.arange(self.next_boundary(begin), end, self._row, dtype=np.int64)

    def count(self, begin: int, end: int) -> int:
        return len(self.starts(begin, end))

    def next_boundary(self, position: int) -> int:
        return min(self.tokens, -(-position // self._row) * self._row) if self._row else position


def open_token_files(paths: Sequence[str | Path]) -> list[TokenFile]:
    """The token files that `data.paths` names, in order: prefixes, `.bin`, `.idx` or `.npy` files, folders, patterns.

    Raises:
        DataError: a file is missing, empty, damaged or named twice.
    """
    if not paths:
        raise DataError("data.paths=[]: data.source=bin reads token files; use data.paths=[PREFIX,…]")
    names = [name for path in paths for name in _found(Path(path))]
    twice = {str(name) for name in names if names.count(name) > 1} if len(names) < 10_000 else set()
    if twice:
        raise DataError(f"data.paths={','.join(sorted(twice))}: is named twice; name each file once")
    files: list[TokenFile] = [ArrayFile(name) if name.suffix == ".npy" else IndexedFile(name) for name in names]
    if empty := [file.name for file in files if not file.tokens]:
        raise DataError(f"data.paths={empty[0]}: has no tokens; use a file with tokens")
    return files


def _found(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        rule = "is a folder without .idx or .npy files"
    elif any(mark in str(path) for mark in "*?["):
        found = sorted(Path(file) for file in glob(str(path), recursive=True) if Path(file).suffix in _SUFFIXES)
        rule = f"no .idx or .npy file matches it (looked from {Path.cwd()})"
    else:
        return [path.with_suffix("") if path.suffix in (".bin", ".idx") else path]
    if not found:
        raise DataError(f"data.paths={path}: {rule}; use prefixes of .bin and .idx files")
    return [file if file.suffix == ".npy" else file.with_suffix("") for file in found]


def check_ids(file: TokenFile, vocab: int, begin: int, end: int) -> None:
    """Raise :class:`DataError` for an id outside 0..vocab-1 in [`begin`, `end`)."""
    ids = file.read(begin, end)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        raise DataError(
            f"token id {ids[outside[0]]} in {file.name} at token {begin + outside[0]}: outside model.vocab={vocab}; "
            f"use ids from 0 to {vocab - 1}, or a larger model.vocab"
        )


def id_violations(files: Sequence[TokenFile], vocab: int, *, limit: int = MAX_TOKENS_READ) -> list[Violation]:
    """A violation for each file with ids above the vocabulary, and for each with ids below 0.

    Args:
        files: the files, each once.
        vocab: ids must be from 0 to below it (`model.vocab`).
        limit: the maximum number of tokens to read; small files are read completely first, and larger ones share the
            rest.
    """
    left, found = limit, {}
    by_size = sorted(range(len(files)), key=lambda at: files[at].tokens)
    for done, at in enumerate(by_size):
        share = min(files[at].tokens, left // (len(files) - done))
        left -= share
        found[at] = list(_violations(files[at], vocab, share))
    return [violation for at in sorted(found) for violation in found[at]]


def _violations(file: TokenFile, vocab: int, limit: int) -> Iterator[Violation]:
    limits = np.iinfo(file.dtype)
    if limits.min >= 0 and limits.max < vocab:
        return
    lowest, highest = (0, 0), (-1, 0)
    for begin, end in pieces(file.tokens, limit):
        ids = file.read(begin, end)
        low, high = int(ids.argmin()), int(ids.argmax())
        lowest, highest = min(lowest, (int(ids[low]), begin + low)), max(highest, (int(ids[high]), begin + high))
    recorded = _recorded_largest(file) if limit < file.tokens else -1
    if max(highest[0], recorded) >= vocab:
        where = f"at token {highest[1]}" if highest[0] >= recorded else f"recorded in {file.name}.json"
        largest = max(highest[0], recorded)
        rule = f"token id {largest} in {file.name}, {where}, is outside the vocabulary"
        advice = f"{largest + 1} or more" if largest < LARGEST_VOCAB else "other token files"
        yield Violation("model.vocab", vocab, rule, (advice,))
    if lowest[0] < 0:
        rule = f"token id {lowest[0]} at token {lowest[1]} is below 0"
        yield Violation("data.paths", file.name, rule, ("files whose ids begin at 0",))


def pieces(tokens: int, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges that hold about `limit` of `tokens` tokens: all of them if the limit allows, else evenly spread."""
    count = -(-tokens // _PIECE_TOKENS)
    chosen = count if limit >= tokens else max(1, limit // _PIECE_TOKENS)
    for number in range(min(count, chosen)):
        begin = _PIECE_TOKENS * (number * (count - 1) // max(1, chosen - 1))
        yield begin, min(tokens, begin + _PIECE_TOKENS)


def _recorded_largest(file: TokenFile) -> int:
    """The largest id that ``megastack tokenize`` recorded; -1 without a record for the same number of tokens."""
    record = read_sidecar(file.name)
    largest = record.get("largest_id")
    return largest if record.get("tokens") == file.tokens and isinstance(largest, int) else -1


def read_sidecar(name: str) -> dict[str, object]:
    """The record that `megastack tokenize` wrote next to a file; empty for other files."""
    path = Path(f"{name}.json")
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # not written by megastack
    return record if isinstance(record, dict) else {}
