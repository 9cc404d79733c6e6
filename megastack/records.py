"""Read the JSON records that megastack writes; every invalid record raises :class:`RecordError`.

A record may be damaged, written by another version or edited by hand. Python's JSON parser accepts more than JSON (NaN,
duplicate names) and raises exceptions that callers do not expect (RecursionError on deep nesting). Every record is read
through this module, so callers handle one exception.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

MAX_INTEGER = 2**63 - 1
"""Largest integer in a record: sizes, offsets and counts are 64-bit."""


class RecordError(ValueError):
    """An invalid record; the message of :func:`read_record` names the file."""


def read_record(path: Path) -> dict[str, Any]:
    """Read a file that contains one JSON object.

    Raises:
        OSError: the file cannot be read.
        RecordError: the file does not contain a valid JSON object.
    """
    try:
        return parse_record(path.read_bytes())
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def parse_record(text: str | bytes) -> dict[str, Any]:
    """Parse text that contains one JSON object.

    Raises:
        RecordError: the text is not a JSON object, repeats a name, or contains a number that is not finite.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite)
        if "\\u" in text:  # an unpaired surrogate parses but cannot be printed
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise RecordError("is nested too deeply") from None
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise RecordError("must hold a JSON object")
    return value


def integer(record: Mapping[str, Any], name: str, *, least: int = 0, most: int = MAX_INTEGER) -> int:
    """Return an integer field of a record.

    Raises:
        RecordError: the field is missing, not an integer, or out of range.
    """
    value = _present(record, name)
    if type(value) is not int or not least <= value <= most:
        raise RecordError(f"{name} must be an integer from {least} to {most}, not {shown(value)}")
    return value


def number(record: Mapping[str, Any], name: str, *, least: float = -math.inf, most: float = math.inf) -> float:
    """Return a finite number from a field of a record.

    Raises:
        RecordError: the field is missing, not a number, or out of range.
    """
    value = _present(record, name)
    if type(value) not in (int, float) or not least <= value <= most or abs(value) > MAX_INTEGER:
        raise RecordError(f"{name} must be a number, not {shown(value)}")
    return float(value)


def string(record: Mapping[str, Any], name: str) -> str:
    """Return a string field of a record.

    Raises:
        RecordError: the field is missing or not a string.
    """
    value = _present(record, name)
    if not isinstance(value, str):
        raise RecordError(f"{name} must be a string, not {shown(value)}")
    return value


def mapping(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an object field of a record.

    Raises:
        RecordError: the field is missing or not an object.
    """
    value = _present(record, name)
    if not isinstance(value, dict):
        raise RecordError(f"{name} must be an object, not {shown(value)}")
    return value


def sequence(record: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list field of a record.

    Raises:
        RecordError: the field is missing or not a list.
    """
    value = _present(record, name)
    if not isinstance(value, list):
        raise RecordError(f"{name} must be a list, not {shown(value)}")
    return value


def integers(record: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a list of non-negative integers from a field of a record.

    Raises:
        RecordError: the field is missing or not a list of non-negative integers.
    """
    values = sequence(record, name)
    return tuple(integer({name: value}, name) for value in values)


def shown(value: object) -> str:
    """Format a value of a record for an error message, truncated."""
    text = ascii(value) if not isinstance(value, int) or abs(value) <= MAX_INTEGER else "a huge integer"
    return text if len(text) <= 40 else f"{text[:40]}…"


def _present(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise RecordError(f"{name} is missing")
    return record[name]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise RecordError(f"the name {shown(counts.most_common(1)[0][0])} occurs twice")
    return record


def _not_finite(text: str) -> NoReturn:
    raise RecordError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise RecordError(f"{shown(text)} is too large a number")
    return value
