"""Slices of input files that can be tokenized independently, and the documents in a slice.

A slice of a `.jsonl` or `.txt` file is a range of bytes and owns the lines that begin in it; a slice of a Parquet file
is a row group. The work can therefore be divided without reading the files, and the documents in slice order do not
depend on the number of processes. Running text is cut as in :mod:`megastack.data.sources`, slice by slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.data.sources import cut, json_text, matching_files
from megastack.errors import DataError

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".parquet": "parquet"}
SLICE_BYTES = 16 << 20

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputSlice:
    """Bytes `begin` to `end` of a file, or row group `begin` of a Parquet file; `size` is its share in bytes.

    An empty file has one slice, of zero length.
    """

    path: str
    kind: str
    begin: int
    end: int
    size: int


@dataclass
class BadLines:
    """The bad lines of a slice: either skipped and counted, or an error."""

    skip: bool = False
    count: int = 0
    first: str | None = None

    def add(self, error: DataError) -> None:
        """Count a bad line, or raise its error."""
        if not self.skip:
            raise error
        self.count += 1
        self.first = self.first or str(error)


def plan_slices(
    paths: Sequence[str | Path], slice_bytes: int = SLICE_BYTES, *, skip_empty: bool = False
) -> list[InputSlice]:
    """Return the slices of all files, in the order of `paths`.

    Raises:
        DataError: a file is missing, of an unknown kind or, unless `skip_empty`, empty.
    """
    files = [file for path in paths for file in matching_files(Path(path), tuple(KINDS))]
    slices = [input_slice for file in files for input_slice in _slices_of(file, slice_bytes)]
    if not skip_empty and (
        empty := next((input_slice for input_slice in slices if input_slice.begin == input_slice.end), None)
    ):
        raise empty_file(empty.path)
    return slices


def empty_file(path: str) -> DataError:
    """Return the error of an input file without documents."""
    return DataError(f"{path}: is empty or has no text; use a file with text, or --on-bad-line skip")


def read_slice(input_slice: InputSlice, field: str, bad: BadLines) -> Iterator[bytes]:
    """Yield the documents of a slice as UTF-8, without empty ones."""
    if input_slice.begin == input_slice.end:
        return iter(())
    readers = {"jsonl": _json_lines, "text": _text, "parquet": _parquet}
    return (document for document in readers[input_slice.kind](input_slice, field, bad) if document)


def _slices_of(path: Path, slice_bytes: int) -> Iterator[InputSlice]:
    kind = KINDS.get(path.suffix)
    if kind is None:
        raise DataError(f"{path}: is not a known kind of file; use {', '.join(KINDS)} files")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); use an existing file") from error
    groups = _parquet_file(str(path)).num_row_groups if size and kind == "parquet" else 0
    if not size or (kind == "parquet" and not groups):
        yield InputSlice(str(path), kind, 0, 0, 0)
        return
    if kind == "parquet":
        yield from (InputSlice(str(path), kind, at, at + 1, size // groups) for at in range(groups))
        return
    for begin in range(0, size, slice_bytes):
        end = min(size, begin + slice_bytes)
        yield InputSlice(str(path), kind, begin, end, end - begin)


def _lines(input_slice: InputSlice) -> tuple[list[bytes], int]:
    """Return the lines that begin in the slice, with line endings, and the byte at which the first one begins."""
    with open(input_slice.path, "rb") as file:
        if input_slice.begin:
            file.seek(input_slice.begin - 1)
            file.readline()  # the rest of a line that begins before the slice
        start = file.tell()
        raw = file.read(max(0, input_slice.end - start))
        if raw and not raw.endswith(b"\n"):
            raw += file.readline()
    skipped = raw.removeprefix(_BOM) if start == 0 else raw
    return [line + b"\n" for line in skipped.split(b"\n")[:-1]] + [skipped.rpartition(b"\n")[2]], start


def _where(input_slice: InputSlice, start: int, line: int) -> str:
    """Return file and line number, found by counting the preceding lines; called for bad lines only."""
    before, left = 1, start
    with open(input_slice.path, "rb") as file:
        while left:
            chunk = file.read(min(left, 1 << 20))
            before, left = before + chunk.count(b"\n"), left - len(chunk)
    return f"{input_slice.path}:{before + line}"


def _json_lines(input_slice: InputSlice, field: str, bad: BadLines) -> Iterator[bytes]:
    lines, start = _lines(input_slice)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            yield json_text(line, "", field)
        except DataError as error:
            bad.add(DataError(_where(input_slice, start, number) + str(error)))


def _text(input_slice: InputSlice, field: str, bad: BadLines) -> Iterator[bytes]:
    lines, start = _lines(input_slice)
    text = b"".join(lines)
    try:
        text.decode()
    except UnicodeDecodeError:
        text = b"".join(_good_lines(input_slice, lines, start, bad))
    return cut(text)


def _good_lines(input_slice: InputSlice, lines: Sequence[bytes], start: int, bad: BadLines) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        try:
            line.decode()
            yield line
        except UnicodeDecodeError as error:
            problem = f"byte 0x{line[error.start]:02x} is not UTF-8 ({error.reason}); use UTF-8 text"
            bad.add(DataError(f"{_where(input_slice, start, number)}: {problem}"))


def _parquet(input_slice: InputSlice, field: str, bad: BadLines) -> Iterator[bytes]:
    file = _parquet_file(input_slice.path)
    if field not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise DataError(f"{input_slice.path}: has no column {field!r}; use --field with one of {names}")
    column = file.read_row_group(input_slice.begin, columns=[field]).column(0)
    for number, value in enumerate(column.to_pylist()):
        if isinstance(value, str):
            yield value.encode()
        else:
            where = f"{input_slice.path}: row {number + 1} of row group {input_slice.begin + 1}"
            bad.add(DataError(f"{where} has no text in column {field!r}; use rows with text, or --on-bad-line skip"))


def _parquet_file(path: str) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow; use pip install 'megastack[parquet]', or .jsonl files") from error
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: is not a Parquet file ({error}); use another file") from error
