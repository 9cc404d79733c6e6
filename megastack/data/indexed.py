"""Megatron's `.bin/.idx` token files, read memory-mapped and written piece by piece.

The `.bin` file holds the ids of all sequences back to back and nothing else; the `.idx` file holds

    9 bytes   MMIDIDX and two zeros
    uint64    version, 1
    uint8     code of the id type, see :data:`CODES`
    uint64    n, the number of sequences
    uint64    d, the number of document bounds
    int32[n]  tokens of each sequence
    int64[n]  where each sequence begins in the .bin file, in bytes
    int64[d]  the sequence that each document begins with, then n

all little-endian. Opening reads the header and a few probes, whatever the size: no array is copied or walked. The
arrays are not aligned in the file, so a library search would copy them whole; bisection touches the pages it needs.
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
"""The format's codes for whole numbers; it has 6 and 7 for fractions, which are no ids."""

_HEAD = struct.Struct("<9sQBQQ")
_PROBES = 64
_LONGEST = 2**31 - 1


def id_dtype(largest: int) -> np.dtype[np.integer]:
    """The type in which ids up to `largest` are written: two bytes unsigned up to 65,535, then four bytes."""
    return np.dtype("<u2" if largest <= 0xFFFF else "<i4")


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


class IndexedFile:
    """A `.bin/.idx` pair, opened for random access to tokens and document starts.

    Args:
        prefix: the path of both files without `.bin` and `.idx`.

    Raises :class:`DataError` for files that are missing, are something else or do not belong together.
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
            raise DataError(f"{bin_path(prefix)}: {counted(len(data), 'byte')}, no whole number of {self.dtype} ids")
        self._ids: Ids = np.frombuffer(data, self.dtype)
        self.tokens, self.documents = len(self._ids), bounds - 1
        self._check(len(data))

    def __reduce__(self) -> tuple[type[IndexedFile], tuple[str]]:
        return IndexedFile, (self.name,)  # another process maps the files again

    @property
    def places(self) -> int:
        """How many places there are at which the file can be cut in two."""
        return self.documents

    def read(self, begin: int, end: int) -> Ids:
        """The ids of the tokens from `begin` to before `end`; a view of the file."""
        return self._ids[begin:end]

    def starts(self, begin: int, end: int) -> Int64s:
        """The places from `begin` to before `end` at which a document begins, each once."""
        first, last = self._documents_before(begin), self._documents_before(end)
        return np.unique(self._pointers[self._bounds[first:last]] // self.dtype.itemsize)

    def count(self, begin: int, end: int) -> int:
        """The documents that begin from `begin` to before `end`."""
        return self._documents_before(end) - self._documents_before(begin)

    def cut(self, place: int) -> int:
        """The first document start at or after `place`; the end of the file where there is none."""
        return self._start(self._documents_before(place))

    def _start(self, document: int) -> int:
        sequence = self._bounds[document]
        return self.tokens if sequence >= len(self._pointers) else int(self._pointers[sequence]) // self.dtype.itemsize

    def _documents_before(self, place: int) -> int:
        """How many documents begin before `place`."""
        return bisect_left(range(self.documents), place, key=self._start)

    def _check(self, size: int) -> None:
        """That both files belong together, looked at in a few places."""
        n = len(self._sizes)
        if self._bounds[0] != 0 or self._bounds[-1] != n:
            raise DataError(f"{self.name}.idx: its documents do not cover its {counted(n, 'sequence')}; write it again")
        ends = 0
        for at in sorted({n * probe // _PROBES for probe in range(_PROBES)} | {n - 1}) if n else ():
            begin, length = int(self._pointers[at]), int(self._sizes[at]) * self.dtype.itemsize
            ends = begin + length
            follows = at + 1 == n or int(self._pointers[at + 1]) == ends
            if length < 0 or begin < 0 or not follows or (at == 0 and begin != 0):
                raise DataError(f"{self.name}.idx: sequence {at} does not lie where its neighbours end; write it again")
        if ends != size:
            raise DataError(
                f"{self.name}.bin: {counted(size, 'byte')} where {self.name}.idx tells of {ends}; copy both files again"
            )


class IndexedWriter:
    """Writes a `.bin/.idx` pair; neither has its name before :meth:`close`, and the index gets its own last.

    Args:
        prefix: the path of both files without `.bin` and `.idx`.
        dtype: the type of the ids, see :func:`id_dtype`.
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self._prefix, self.dtype = Path(prefix), np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, name in CODES.items() if np.dtype(name) == self.dtype), None)
        if self._code is None:
            raise DataError(f"{prefix}: {self.dtype} is no type of the format; use uint16, int32 or int64")
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
        """Append one document; raises :class:`DataError` for an id that the type cannot hold."""
        limits = np.iinfo(self.dtype)
        if len(document) and not limits.min <= int(document.min()) <= int(document.max()) <= limits.max:
            raise DataError(
                f"{self._prefix}: an id outside {limits.min} to {limits.max}, which {self.dtype} cannot hold"
            )
        self.add_many(document.astype(self.dtype).tobytes(), np.array([len(document)]))

    def add_many(self, ids: bytes | memoryview, lengths: npt.NDArray[np.integer]) -> None:
        """Append documents whose ids stand back to back in `ids`, already in the writer's type."""
        if len(lengths) and int(lengths.max()) > _LONGEST:
            raise DataError(f"{self._prefix}: a document of {lengths.max()} tokens; the format holds {_LONGEST}")
        self._unfinished.write(ids)
        self._lengths.append(lengths.astype("<i4"))

    def close(self) -> None:
        """Write the index and give both files their names."""
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
    """The id type, the number of sequences and of document bounds."""
    if len(raw) < _HEAD.size or bytes(raw[: len(MAGIC)]) != MAGIC:
        raise DataError(f"{path}: no index of the MMIDIDX format; use what `megastack tokenize` or Megatron wrote")
    _, version, code, sequences, bounds = _HEAD.unpack(bytes(raw[: _HEAD.size]))
    if version != VERSION or code not in CODES:
        raise DataError(
            f"{path}: version {version}, type {code}; use version {VERSION} and one of the types {[*CODES]}"
        )
    needed = _HEAD.size + 12 * sequences + 8 * bounds
    if bounds < 1 or len(raw) < needed:
        raise DataError(f"{path}: {counted(len(raw), 'byte')} where its header tells of {needed}; copy it again")
    return np.dtype(CODES[code]), sequences, bounds
