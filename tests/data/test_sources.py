"""Documents of each source, and inputs that are rejected."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastack.data.sources import DOCUMENT_BYTES, cut, read_documents
from megastack.errors import DataError


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="aé€𝄞 \n\r", max_size=300), st.integers(4, 40))
def test_cut_loses_nothing_and_keeps_characters_whole(text: str, limit: int) -> None:
    pieces = list(cut(text.encode(), limit))
    assert b"".join(pieces) == text.encode()
    assert all(0 < len(piece) <= limit for piece in pieces)
    for piece in pieces:
        piece.decode()


def test_cut_prefers_paragraph_then_line_then_space() -> None:
    assert list(cut(b"one\n\ntwo\nthree four", 12)) == [b"one\n\n", b"two\n", b"three four"]
    assert list(cut(b"aa\n\nbb\n\ncc", 9)) == [b"aa\n\nbb\n\n", b"cc"]
    assert list(cut(b"aaa bbb ccc", 9)) == [b"aaa bbb ", b"ccc"]
    assert list(cut(b"abcdefgh", 5)) == [b"abcde", b"fgh"]
    assert list(cut(b" abcdefgh", 5)) == [b" ", b"abcde", b"fgh"]
    assert list(cut(b"aa\r\n\r\nbb\r\ncc", 10)) == [b"aa\r\n\r\n", b"bb\r\ncc"]


def test_builtin_has_much_text_in_small_documents_in_a_fixed_order() -> None:
    documents = list(read_documents("builtin"))
    assert sum(map(len, documents)) > 300_000
    assert max(map(len, documents)) <= DOCUMENT_BYTES
    assert len(documents) > 100
    assert documents == list(read_documents("builtin"))


def test_text_files_come_in_the_order_given(tmp_path: Path) -> None:
    first, second = tmp_path / "b.txt", tmp_path / "a.txt"
    first.write_bytes(b"\xef\xbb\xbffirst")  # a byte order mark is not text
    second.write_text("second " * 1000)
    documents = list(read_documents("text", [first, str(second)]))
    assert documents[0] == b"first"
    assert b"".join(documents[1:]) == b"second " * 1000
    assert len(documents) == 3


def test_folders_and_patterns_stand_for_their_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "c.md", "deep/d.txt"):
        (tmp_path / name).write_text(name)
    assert list(read_documents("text", [tmp_path])) == [b"a.txt", b"b.txt", b"deep/d.txt"]
    assert list(read_documents("text", [tmp_path / "*.txt", tmp_path / "c.md"])) == [b"a.txt", b"b.txt", b"c.md"]
    odd = tmp_path / "what?.txt"
    odd.write_text("the file of that very name")
    assert list(read_documents("text", [odd])) == [b"the file of that very name"]


def test_a_jsonl_line_is_one_document_however_long(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["x\n\ny" * 4000, "é", "", "last"]
    path.write_text("\n\n".join(json.dumps({"text": text, "id": 1}) for text in texts) + "\n")
    assert list(read_documents("jsonl", [path])) == [text.encode() for text in texts if text]


def rejected(source: str, paths: list[Path]) -> str:
    with pytest.raises(DataError) as caught:
        list(read_documents(source, paths))
    return str(caught.value)


def test_sources_and_paths_that_do_not_match_are_rejected(tmp_path: Path) -> None:
    assert "data.paths=[]" in rejected("text", [])
    assert "data.source=builtin reads no files" in rejected("builtin", [tmp_path])
    message = rejected("parquet", [tmp_path])
    assert "data.source=parquet" in message and "builtin" in message and "jsonl" in message and "text" in message


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_files_that_cannot_be_read_are_rejected_by_name(tmp_path: Path, source: str) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.touch()
    assert f"{missing}: does not exist" in rejected(source, [missing])
    assert f"{empty}: is empty" in rejected(source, [empty])
    assert f"{tmp_path}: is a folder without" in rejected(source, [tmp_path])
    assert f"{tmp_path}/*.x: no file matches it" in rejected(source, [tmp_path / "*.x"])


def test_an_error_of_the_operating_system_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", deny)
    assert "cannot be read: Permission denied" in rejected("text", [tmp_path / "secret.txt"])


def test_text_that_is_not_utf8_is_rejected_by_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\nfine\ncaf\xe9 noir\n")
    assert f"{path}:3: byte 0xe9 is not UTF-8" in rejected("text", [path])


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"text": "caf\xe9"}', "byte 0xe9 is not UTF-8"),
        (b'{"text": "half}', "is not JSON"),
        (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b'{"content": "a"}', 'no string field "text"'),
        (b'{"text": 5}', 'no string field "text"'),
        (b'["text"]', 'no string field "text"'),
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
    ],
    ids=range(7),
)
def test_invalid_jsonl_lines_are_rejected_by_number(tmp_path: Path, line: bytes, error: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    message = rejected("jsonl", [path])
    assert f"{path}:3" in message and error in message
