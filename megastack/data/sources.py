"""Sources of documents: the built-in corpus, `.txt` files and `.jsonl` files, always in the same order.

A document is a byte string that is valid UTF-8. Running text (the built-in corpus and `.txt` files) is cut into
documents of at most 4 KB at paragraph ends, without losing a byte, so that even a single long file can be split into
training and validation. Each line of a `.jsonl` file is one document, however long: use it for documents with known
ends. This module is independent of tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob
from pathlib import Path

from megastack.errors import DataError

DOCUMENT_BYTES = 4096
"""The maximum size of a document of running text, in bytes."""

_CUTS = (b"\n\n", b"\n\r\n", b"\n", b" ")


def read_documents(source: str, paths: Sequence[str | Path] = ()) -> Iterator[bytes]:
    """The documents of `source` (`builtin`, `text` or `jsonl`), in the order of `paths` and of the files.

    A folder selects the `.txt` or `.jsonl` files below it, and a pattern (`texts/*.txt`) selects the files that match
    it, in order of their names. Empty documents are skipped.

    Raises:
        DataError: the source is unknown, or paths are missing or superfluous. For a file that is missing, unreadable,
            empty, not UTF-8 or not JSON, the message names file and line.
    """
    if source == "builtin":
        _check_no_paths(paths)
        return _builtin()
    if source not in _READERS:
        raise DataError(f"data.source={source}: is not a source; use builtin, {' or '.join(sorted(_READERS))}")
    if not paths:
        raise DataError(f"data.paths=[]: data.source={source} reads files; use data.paths=[FILE,…]")
    reader, suffix = _READERS[source]
    return _files(reader, [file for path in paths for file in matching_files(Path(path), (suffix,))])


def cut(text: bytes, limit: int = DOCUMENT_BYTES) -> Iterator[bytes]:
    """Cut `text` into pieces of at most `limit` bytes: at the last paragraph end, else line end, space or character.

    The concatenated pieces are the text.
    """
    start = 0
    while start < len(text):
        end = len(text) if len(text) - start <= limit else _cut_point(text, start, start + limit)
        yield text[start:end]
        start = end


def _cut_point(text: bytes, start: int, stop: int) -> int:
    for mark in _CUTS:
        found = text.rfind(mark, start, stop)
        if found >= start:
            return found + len(mark)
    end = stop
    while end > start and text[end] & 0xC0 == 0x80:  # a continuation byte: the character begins before it
        end -= 1
    return end if end > start else stop


def _check_no_paths(paths: Sequence[str | Path]) -> None:
    if paths:
        listed = ",".join(map(str, paths))
        raise DataError(f"data.paths=[{listed}]: data.source=builtin reads no files; use data.source=text or jsonl")


def _builtin() -> Iterator[bytes]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            "data.source=builtin: this Python lacks pydoc_data, which holds the text; use data.source=text"
        ) from error
    for name in sorted(topics):
        yield from cut(topics[name].encode())


def _files(reader: Callable[[Path], Iterable[bytes]], paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        found = False
        for document in reader(path):
            found = True
            yield document
        if not found:
            raise DataError(f"data.paths={path}: is empty; use a file with text")


def matching_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files that a path selects: itself, the files of a folder with these suffixes, or the matches of a pattern."""
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
        rule = f"is a folder without {' or '.join(suffixes)} files"
    elif not path.exists() and any(mark in str(path) for mark in "*?["):
        found = sorted(Path(file) for file in glob(str(path), recursive=True) if Path(file).is_file())
        rule = f"no file matches it (looked from {Path.cwd()})"
    else:
        return [path]
    if not found:
        raise DataError(f"data.paths={path}: {rule}; use files, or a folder or pattern of files")
    return found


def _text(path: Path) -> Iterator[bytes]:
    raw = _read(path)
    _check_utf8(raw, path)
    return cut(raw.removeprefix(b"\xef\xbb\xbf"))


def _jsonl(path: Path) -> Iterator[bytes]:
    for number, line in enumerate(_read(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip() and (document := json_text(line, f"data.paths={path}:{number}")):
            yield document


def json_text(line: bytes, where: str, field: str = "text") -> bytes:
    """The text of one line of a `.jsonl` file; raises :class:`DataError` with a message that begins with `where`."""
    example = f'use one object per line: {{"{field}": "…"}}'
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {_utf8_error(error)}") from error
    except (ValueError, RecursionError) as error:  # ValueError: also an integer with thousands of digits
        raise DataError(f"{where}: is not JSON ({error}); {example}") from error
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise DataError(f'{where}: has no string field "{field}"; {example}')
    try:
        return record[field].encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half a surrogate pair, which is not a character; use whole pairs") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"data.paths={path}: does not exist (looked in {Path.cwd()}); use an existing file") from error
    except OSError as error:
        raise DataError(f"data.paths={path}: cannot be read: {error.strerror}; use a readable file") from error


def _check_utf8(raw: bytes, path: Path) -> None:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"data.paths={path}:{line}: {_utf8_error(error)}") from error


def _utf8_error(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason}); use UTF-8 text"


_READERS: dict[str, tuple[Callable[[Path], Iterator[bytes]], str]] = {
    "text": (_text, ".txt"),
    "jsonl": (_jsonl, ".jsonl"),
}
