"""Megatron's `.bin/.idx` token files: memory-mapped reading, incremental writing.

The `.bin` file holds the ids of all sequences back to back and nothing else; the `.idx` file holds

    9 bytes   MMIDIDX and two zeros
    uint64    version, 1
    uint8     code of the id type (:data:`CODES`)
    uint64    n, the number of sequences
    uint64    d, the number of document bounds
    int32[n]  tokens of each sequence
    int64[n]  byte offset of each sequence in the .bin file
    int64[d]  index of the first sequence of each document, then n

all little-endian. Opening a pair reads the header and a few probes, whatever its size; no array is copied or scanned.
The arrays are unaligned in the file, so `numpy.searchsorted` would copy them completely; `bisect` touches only the
pages it needs.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megastack.errors import DataError, counted

Ids = npt.NDArray[np.integer]
Int64s = npt.NDArray[np.int64]

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""The format's codes for integer types; 6 and 7 are floating-point types, which cannot hold ids."""

_HEAD = struct.Struct("<9sQBQQ")
_PROBES = 64
_MAX_DOCUMENT = 2**31 - 1


def id_dtype(largest: int) -> np.dtype[np.integer]:
    """The type in which ids up to `largest` are written: two unsigned bytes up to 65,535, four bytes beyond."""
    return np.dtype("<u2" if largest <= 0xFFFF else "<i4")


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class IndexedFile:
    """A `.bin/.idx` pair, opened for random access to tokens and document starts (a :class:`TokenFile`).

    Args:
        prefix: the path of both files without `.bin` and `.idx`.

    Raises:
        DataError: a file is missing or invalid, or the two files do not match.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.name = str(prefix)
        raw = _mapped(idx_path(prefix))
        self.dtype, sequences, bounds = _header(raw, idx_path(prefix))
        at = _HEAD.size
        self._sizes = np.frombuffer(raw, "<i4", sequences, at)
        self._pointers = np.frombuffer(raw, "<i8", sequences, at + 4 * sequences)
        self._bounds = np.frombuffer(raw, "<i8", bounds, at + 12 * sequences)
        data = _mapped(bin_path(prefix))
        if len(data) % self.dtype.itemsize:
            size = counted(len(data), "byte")
            raise DataError(f"{bin_path(prefix)}: {size}, not a multiple of the size of {self.dtype} ids")
        self._ids: Ids = np.frombuffer(data, self.dtype)
        self.tokens, self.documents = len(self._ids), bounds - 1
        self._check(len(data))

    def __reduce__(self) -> tuple[type[IndexedFile], tuple[str]]:
        return IndexedFile, (self.name,)  # another process maps the files itself

    @property
    def boundaries(self) -> int:
        """The number of positions at which the file may be divided: one for each document."""
        return self.documents

    def read(self, begin: int, end: int) -> Ids:
        """The ids of the tokens in [`begin`, `end`); a view of the file."""
        return self._ids[begin:end]

    def starts(self, begin: int, end: int) -> Int64s:
        """The positions in [`begin`, `end`) at which a document begins, each once."""
        first, last = self._documents_before(begin), self._documents_before(end)
        return np.unique(self._pointers[self._bounds[first:last]] // self.dtype.itemsize)

    def count(self, begin: int, end: int) -> int:
        """The number of documents that begin in [`begin`, `end`)."""
        return self._documents_before(end) - self._documents_before(begin)

    def next_boundary(self, position: int) -> int:
        """The first document start at or after `position`; the end of the file if there is none."""
        return self._start(self._documents_before(position))

    def _start(self, document: int) -> int:
        sequence = self._bounds[document]
        return self.tokens if sequence >= len(self._pointers) else int(self._pointers[sequence]) // self.dtype.itemsize

    def _documents_before(self, position: int) -> int:
        """The number of documents that begin before `position`."""
        return bisect_left(range(self.documents), position, key=self._start)

    def _check(self, size: int) -> None:
        """Check that both files match, by the header and a few probes; `size` is the size of the `.bin` file."""
        n = len(self._sizes)
        if self._bounds[0] != 0 or self._bounds[-1] != n:
            raise DataError(f"{self.name}.idx: its documents do not cover its {counted(n, 'sequence')}; write it again")
        ends = 0
        for at in sorted({n * probe // _PROBES for probe in range(_PROBES)} | {n - 1}) if n else ():
            begin, length = int(self._pointers[at]), int(self._sizes[at]) * self.dtype.itemsize
            ends = begin + length
            follows = at + 1 == n or int(self._pointers[at + 1]) == ends
            if length < 0 or begin < 0 or not follows or (at == 0 and begin != 0):
                raise DataError(f"{self.name}.idx: sequence {at} is not adjacent to its neighbours; write it again")
        if ends != size:
            raise DataError(
                f"{self.name}.bin: {counted(size, 'byte')}, but {self.name}.idx describes {ends}; copy both files again"
            )


class IndexedWriter:
    """Writes a `.bin/.idx` pair. :meth:`close` renames both files into place, the index last.

    Args:
        prefix: the path of both files without `.bin` and `.idx`.
        dtype: the type of the ids (:func:`id_dtype`).
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self._prefix, self.dtype = Path(prefix), np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, name in CODES.items() if np.dtype(name) == self.dtype), None)
        if self._code is None:
            raise DataError(f"{prefix}: the format cannot store {self.dtype}; use uint16, int32 or int64")
        self._prefix.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished: BinaryIO = open(f"{self._prefix}.bin.part", "wb")  # noqa: SIM115  (closed in close)
        self._lengths: list[npt.NDArray[np.int32]] = []

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._unfinished.close()
            os.unlink(self._unfinished.name)

    def add(self, document: Ids) -> None:
        """Append one document.

        Raises:
            DataError: the type cannot hold an id.
        """
        limits = np.iinfo(self.dtype)
        if len(document) and not limits.min <= int(document.min()) <= int(document.max()) <= limits.max:
            raise DataError(
                f"{self._prefix}: an id outside {limits.min} to {limits.max}, which {self.dtype} cannot hold"
            )
        self.add_many(document.astype(self.dtype).tobytes(), np.array([len(document)]))

    def add_many(self, ids: bytes | memoryview, lengths: npt.NDArray[np.integer]) -> None:
        """Append documents whose ids are back to back in `ids`, already in the writer's type."""
        if len(lengths) and int(lengths.max()) > _MAX_DOCUMENT:
            raise DataError(f"{self._prefix}: a document of {lengths.max()} tokens; the format allows {_MAX_DOCUMENT}")
        self._unfinished.write(ids)
        self._lengths.append(lengths.astype("<i4"))

    def close(self) -> None:
        """Write the index and rename both files into place."""
        self._unfinished.flush()
        os.fsync(self._unfinished.fileno())
        self._unfinished.close()
        unfinished = f"{self._prefix}.idx.part"
        with open(unfinished, "wb") as out:
            out.writelines(self._index())
            out.flush()
            os.fsync(out.fileno())
        os.replace(self._unfinished.name, bin_path(self._prefix))
        os.replace(unfinished, idx_path(self._prefix))

    def _index(self) -> Iterable[bytes]:
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, "<i4")
        pointers = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        yield _HEAD.pack(MAGIC, VERSION, self._code, len(lengths), len(lengths) + 1)
        yield lengths.tobytes()
        yield (pointers * self.dtype.itemsize).tobytes()
        yield np.arange(len(lengths) + 1, dtype="<i8").tobytes()


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    try:
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except FileNotFoundError as error:
        raise DataError(
            f"data.paths={path}: does not exist (looked in {Path.cwd()}); use both .bin and .idx"
        ) from error
    except OSError as error:
        raise DataError(f"data.paths={path}: cannot be read: {error.strerror}; use a readable file") from error


def _header(raw: npt.NDArray[np.uint8], path: Path) -> tuple[np.dtype[np.integer], int, int]:
    """The id type, the number of sequences and the number of document bounds."""
    if len(raw) < _HEAD.size or bytes(raw[: len(MAGIC)]) != MAGIC:
        raise DataError(f"{path}: not an MMIDIDX index; use a file written by `megastack tokenize` or Megatron")
    _, version, code, sequences, bounds = _HEAD.unpack(bytes(raw[: _HEAD.size]))
    if version != VERSION or code not in CODES:
        raise DataError(
            f"{path}: version {version}, type {code}; use version {VERSION} and one of the types {[*CODES]}"
        )
    needed = _HEAD.size + 12 * sequences + 8 * bounds
    if bounds < 1 or len(raw) < needed:
        raise DataError(f"{path}: {counted(len(raw), 'byte')}, but its header describes {needed}; copy it again")
    return np.dtype(CODES[code]), sequences, bounds
