"""Token files for `data.source=bin`: finding them, and what the samples need of one.

A file is addressed, never read through. It says where documents begin in a given stretch, so that neither opening it
nor cutting samples out of it costs anything that grows with the corpus.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megastack.data.indexed import IndexedFile
from megastack.errors import DataError

Ids = npt.NDArray[np.integer]
Int64s = npt.NDArray[np.int64]

_SUFFIXES = (".idx", ".npy")
_PIECE = 4096
"""Tokens of an array without documents between two places at which it may be cut in two."""


class TokenFile(Protocol):
    """Tokens with random access, and where documents begin among them."""

    @property
    def name(self) -> str: ...

    @property
    def tokens(self) -> int: ...

    @property
    def places(self) -> int:
        """How many places there are at which the file can be cut in two."""

    @property
    def dtype(self) -> np.dtype[np.integer]: ...

    def read(self, begin: int, end: int) -> Ids:
        """The ids of the tokens from `begin` to before `end`."""

    def starts(self, begin: int, end: int) -> Int64s:
        """The places from `begin` to before `end` at which a document begins, each once, ascending."""

    def count(self, begin: int, end: int) -> int:
        """The documents that begin from `begin` to before `end`."""

    def cut(self, place: int) -> int:
        """The first place at or after `place` at which the file may be cut in two; its end where there is none."""


class ArrayFile:
    """A `.npy` array of ids: one document for each row of two dims; one running text, cut anywhere, for one dim."""

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"data.paths={path}: cannot be read as an array ({error}); use a .npy file") from error
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
            raise DataError(f"{path}: {array.dtype}{list(array.shape)}; use whole numbers of one or two dims")
        self._ids: Ids = array.reshape(-1)
        self._row = array.shape[1] if array.ndim == 2 else 0
        self.tokens, self.dtype = len(self._ids), array.dtype
        self.places = self.tokens // (self._row or _PIECE)

    def __reduce__(self) -> tuple[type[ArrayFile], tuple[str]]:
        return ArrayFile, (self.name,)

    def read(self, begin: int, end: int) -> Ids:
        return self._ids[begin:end]

    def starts(self, begin: int, end: int) -> Int64s:
        if not self._row:
            return np.arange(1 if begin == 0 < end else 0, dtype=np.int64)
        return np.arange(self.cut(begin), end, self._row, dtype=np.int64)

    def count(self, begin: int, end: int) -> int:
        return len(self.starts(begin, end))

    def cut(self, place: int) -> int:
        return min(self.tokens, -(-place // self._row) * self._row) if self._row else place


def open_token_files(paths: Sequence[str | Path]) -> list[TokenFile]:
    """The token files that `data.paths` names, in order: prefixes, `.bin`, `.idx` or `.npy` files, folders, patterns.

    Raises :class:`DataError` for whatever is missing, empty, damaged or named twice.
    """
    if not paths:
        raise DataError("data.paths=[]: data.source=bin reads token files; use data.paths=[PREFIX,…]")
    names = [name for path in paths for name in _found(Path(path))]
    twice = {str(name) for name in names if names.count(name) > 1} if len(names) < 10_000 else set()
    if twice:
        raise DataError(f"data.paths={','.join(sorted(twice))}: is named twice; name each file once")
    files: list[TokenFile] = [ArrayFile(name) if name.suffix == ".npy" else IndexedFile(name) for name in names]
    if empty := [file.name for file in files if not file.tokens]:
        raise DataError(f"data.paths={empty[0]}: holds no token; use a file with tokens")
    return files


def check_ids(file: TokenFile, vocab: int, begin: int, end: int) -> None:
    """Raises :class:`DataError` for an id outside 0..vocab-1 in this stretch.

    A whole corpus is not walked for that: what a sample holds is looked at again when it is read.
    """
    ids = file.read(begin, end)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        raise DataError(
            f"token id {ids[outside[0]]} in {file.name} at token {begin + outside[0]}: outside model.vocab={vocab}; "
            f"use ids from 0 to {vocab - 1}, or a larger model.vocab"
        )


def written_about(name: str) -> dict[str, object]:
    """What `megastack tokenize` noted beside the file that it wrote; empty for other files."""
    beside = Path(f"{name}.json")
    if not beside.is_file():
        return {}
    try:
        record = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # somebody else's file
    return record if isinstance(record, dict) else {}


def _found(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        what = "is a folder without .idx or .npy files"
    elif any(mark in str(path) for mark in "*?["):
        found = sorted(Path(file) for file in glob(str(path), recursive=True) if Path(file).suffix in _SUFFIXES)
        what = f"no .idx or .npy file matches it (looked from {Path.cwd()})"
    else:
        return [path.with_suffix("") if path.suffix in (".bin", ".idx") else path]
    if not found:
        raise DataError(f"data.paths={path}: {what}; use prefixes of .bin and .idx files")
    return [file if file.suffix == ".npy" else file.with_suffix("") for file in found]
