"""Any bytes are a JSON record or raise ``RecordError``."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastack.records import (
    RecordError,
    integer,
    integers,
    mapping,
    number,
    parse_record,
    read_record,
    sequence,
    string,
)

INVALID = {
    "empty": b"",
    "cut": b'{"a": 1',
    "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "list": b"[1]",
    "null": b"null",
    "not text": b"\xff\xfe{}",
    "NaN": b'{"a": NaN}',
    "infinite": b'{"a": [-Infinity]}',
    "too large": b'{"a": 1e999}',
    "digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "twice": b'{"a": 1, "a": 2}',
    "twice below": b'{"a": [{"b": 1, "b": 1}]}',
    "half a pair": b'{"a": "\\ud800"}',
    "two": b"{} {}",
}


@pytest.mark.parametrize("text", INVALID.values(), ids=INVALID)
def test_an_invalid_record_is_an_error_that_names_the_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(text)
    with pytest.raises(RecordError, match=f"^{path}: ") as error:
        read_record(path)
    assert len(str(error.value)) < 300 + len(str(path))


@given(st.binary(max_size=40))
def test_any_bytes_are_a_record_or_an_error(text: bytes) -> None:
    with contextlib.suppress(RecordError):
        assert isinstance(parse_record(text), dict)


@pytest.mark.parametrize("value", [None, True, 1.0, "1", -1, 2**63, [1], {}, pytest.param(10**5000, id="huge")])
def test_an_integer_is_an_integer_in_range(value: object) -> None:
    for read in (lambda: integer({"a": value}, "a"), lambda: integers({"a": [value]}, "a"), lambda: integer({}, "a")):
        with pytest.raises(RecordError, match=r"^a "):
            read()
    assert integer({"a": 2**63 - 1}, "a") == 2**63 - 1 and integers({"a": [0, 3]}, "a") == (0, 3)


def test_fields_have_their_types() -> None:
    good = {"n": 1.5, "s": "x", "m": {}, "l": []}
    assert (number(good, "n"), string(good, "s"), mapping(good, "m"), sequence(good, "l")) == (1.5, "x", {}, [])
    for read in (number, string, mapping, sequence):
        for value in (None, True, float("nan"), 10**400):
            with pytest.raises(RecordError, match=r"^a "):
                read({"a": value}, "a")
