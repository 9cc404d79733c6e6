"""Read the JSON records that megastack writes: a file is a valid record or a :class:`RecordError` that names it.

A record may come from a disk that lost part of it, from an older version, or from an editor. Python's JSON reader
accepts more than JSON (NaN, a name twice) and can fail in ways that callers do not expect (RecursionError on deep
nesting). Everything that is read back goes through here, and callers have one exception to handle.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

MOST = 2**63 - 1
"""The largest integer of a record: sizes, offsets and counts are 64-bit."""


class RecordError(ValueError):
    """Text that is not the record it should be; the message names the file."""


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError: the file cannot be read.
        RecordError: it does not hold one JSON object.
    """
    try:
        return parse_record(path.read_bytes())
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None


def parse_record(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        RecordError: it is not one JSON object, repeats a name, or holds a number that is not finite.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite)
        if "\\u" in text:  # half a surrogate pair parses, and cannot be printed
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


def integer(record: Mapping[str, Any], name: str, *, least: int = 0, most: int = MOST) -> int:
    """An integer of a record.

    Raises:
        RecordError: it is missing, not an integer, or out of range.
    """
    value = _present(record, name)
    if type(value) is not int or not least <= value <= most:
        raise RecordError(f"{name} must be an integer from {least} to {most}, not {shown(value)}")
    return value


def number(record: Mapping[str, Any], name: str, *, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number of a record.

    Raises:
        RecordError: it is missing, not a number, or out of range.
    """
    value = _present(record, name)
    if type(value) not in (int, float) or not least <= value <= most or abs(value) > MOST:
        raise RecordError(f"{name} must be a number, not {shown(value)}")
    return float(value)


def string(record: Mapping[str, Any], name: str) -> str:
    """A string of a record.

    Raises:
        RecordError: it is missing or not a string.
    """
    value = _present(record, name)
    if not isinstance(value, str):
        raise RecordError(f"{name} must be a string, not {shown(value)}")
    return value


def mapping(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object of a record.

    Raises:
        RecordError: it is missing or not an object.
    """
    value = _present(record, name)
    if not isinstance(value, dict):
        raise RecordError(f"{name} must be an object, not {shown(value)}")
    return value


def sequence(record: Mapping[str, Any], name: str) -> list[Any]:
    """A list of a record.

    Raises:
        RecordError: it is missing or not a list.
    """
    value = _present(record, name)
    if not isinstance(value, list):
        raise RecordError(f"{name} must be a list, not {shown(value)}")
    return value


def integers(record: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of integers from 0 on.

    Raises:
        RecordError: it is missing or something else.
    """
    values = sequence(record, name)
    return tuple(integer({name: value}, name) for value in values)


def shown(value: Any) -> str:
    """A value of a record for a message, cut short."""
    text = ascii(value) if not isinstance(value, int) or abs(value) <= MOST else "a huge integer"
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
