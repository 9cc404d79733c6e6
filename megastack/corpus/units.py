"""Pieces of input files that can be tokenized apart, and the documents that are in one.

A unit of a `.jsonl` or `.txt` file is a range of bytes and owns the lines that begin in it; a unit of a Parquet file is
a row group. So nothing has to be read to divide the work, and the documents in the order of the units are the same for
every number of processes. Running text is cut as :mod:`megastack.data.sources` cuts it, unit by unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megastack.data.sources import cut, json_text, matching_files
from megastack.errors import DataError

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".parquet": "parquet"}
UNIT_BYTES = 16 << 20

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Unit:
    """Bytes `begin` to `end` of a file, or the row group `begin` of a Parquet file; `size` is its part of the file.

    An empty file makes one unit that ends where it begins.
    """

    path: str
    kind: str
    begin: int
    end: int
    size: int


@dataclass
class BadLines:
    """What was left out, or whether it is to stop everything."""

    skip: bool = False
    count: int = 0
    first: str | None = None

    def meet(self, error: DataError) -> None:
        """Count a bad line, or raise what is wrong with it."""
        if not self.skip:
            raise error
        self.count += 1
        self.first = self.first or str(error)


def plan_units(paths: Sequence[str | Path], unit_bytes: int = UNIT_BYTES, *, skip_empty: bool = False) -> list[Unit]:
    """The units of all files, in the order of `paths`.

    Raises :class:`DataError` for a file that is missing or of no known kind, and for an empty one unless `skip_empty`.
    """
    files = [file for path in paths for file in matching_files(Path(path), tuple(KINDS))]
    units = [unit for file in files for unit in _units(file, unit_bytes)]
    if not skip_empty and (empty := next((unit for unit in units if unit.begin == unit.end), None)):
        raise empty_file(empty.path)
    return units


def empty_file(path: str) -> DataError:
    """What is wrong with an input that holds no document."""
    return DataError(f"{path}: is empty, nothing in it makes a token; use a file with text, or --on-bad-line skip")


def read_unit(unit: Unit, field: str, bad: BadLines) -> Iterator[bytes]:
    """The documents of a unit as UTF-8; those without a byte are left out."""
    if unit.begin == unit.end:
        return iter(())
    readers = {"jsonl": _json_lines, "text": _text, "parquet": _parquet}
    return (document for document in readers[unit.kind](unit, field, bad) if document)


def _units(path: Path, unit_bytes: int) -> Iterator[Unit]:
    kind = KINDS.get(path.suffix)
    if kind is None:
        raise DataError(f"{path}: of no known kind; use {', '.join(KINDS)} files")
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); use an existing file") from error
    groups = _parquet_file(str(path)).num_row_groups if size and kind == "parquet" else 0
    if not size or (kind == "parquet" and not groups):
        yield Unit(str(path), kind, 0, 0, 0)
        return
    if kind == "parquet":
        yield from (Unit(str(path), kind, at, at + 1, size // groups) for at in range(groups))
        return
    for begin in range(0, size, unit_bytes):
        end = min(size, begin + unit_bytes)
        yield Unit(str(path), kind, begin, end, end - begin)


def _lines(unit: Unit) -> tuple[list[bytes], int]:
    """The lines that begin in the unit, each with its end, and the byte that the first one begins at."""
    with open(unit.path, "rb") as file:
        if unit.begin:
            file.seek(unit.begin - 1)
            file.readline()  # the rest of a line that began before
        start = file.tell()
        raw = file.read(max(0, unit.end - start))
        if raw and not raw.endswith(b"\n"):
            raw += file.readline()
    skipped = raw.removeprefix(_BOM) if start == 0 else raw
    return [line + b"\n" for line in skipped.split(b"\n")[:-1]] + [skipped.rpartition(b"\n")[2]], start


def _where(unit: Unit, start: int, line: int) -> str:
    """File and line, found by counting the lines before; asked about bad lines only."""
    before, left = 1, start
    with open(unit.path, "rb") as file:
        while left:
            chunk = file.read(min(left, 1 << 20))
            before, left = before + chunk.count(b"\n"), left - len(chunk)
    return f"{unit.path}:{before + line}"


def _json_lines(unit: Unit, field: str, bad: BadLines) -> Iterator[bytes]:
    lines, start = _lines(unit)
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            yield json_text(line, "", field)
        except DataError as error:
            bad.meet(DataError(_where(unit, start, number) + str(error)))


def _text(unit: Unit, field: str, bad: BadLines) -> Iterator[bytes]:
    lines, start = _lines(unit)
    text = b"".join(lines)
    try:
        text.decode()
    except UnicodeDecodeError:
        text = b"".join(_good_lines(unit, lines, start, bad))
    return cut(text)


def _good_lines(unit: Unit, lines: Sequence[bytes], start: int, bad: BadLines) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        try:
            line.decode()
            yield line
        except UnicodeDecodeError as error:
            problem = f"byte 0x{line[error.start]:02x} is not UTF-8 ({error.reason}); use UTF-8 text"
            bad.meet(DataError(f"{_where(unit, start, number)}: {problem}"))


def _parquet(unit: Unit, field: str, bad: BadLines) -> Iterator[bytes]:
    file = _parquet_file(unit.path)
    if field not in file.schema_arrow.names:
        names = ", ".join(file.schema_arrow.names)
        raise DataError(f"{unit.path}: has no column {field!r}; use --field with one of {names}")
    column = file.read_row_group(unit.begin, columns=[field]).column(0)
    for number, value in enumerate(column.to_pylist()):
        if isinstance(value, str):
            yield value.encode()
        else:
            where = f"{unit.path}: row {number + 1} of row group {unit.begin + 1}"
            bad.meet(DataError(f"{where} has no text in {field!r}; use rows with text, or --on-bad-line skip"))


def _parquet_file(path: str) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow; use pip install 'megastack[parquet]', or .jsonl files") from error
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: no Parquet file ({error}); use another file") from error
