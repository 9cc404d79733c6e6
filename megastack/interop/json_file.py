"""Read the JSON files of a Hugging Face folder; an error about an invalid value names its key.

Only strict JSON is accepted: no NaN, infinity or numbers too large for a float, no duplicate keys, no text that is not
Unicode. Python's reader accepts these silently or fails with a traceback.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from megastack.errors import ConfigError

DEEPEST = 64
"""Maximum depth of nested objects and lists."""
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


@dataclass(frozen=True)
class _Invalid:
    """An invalid value: its text and the rule that it violates."""

    text: str
    rule: str


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        ConfigError: the file is missing, is not a JSON object, or has invalid values; the message names their keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(
            text, parse_constant=_constant, parse_float=_float, parse_int=_int, object_pairs_hook=_object
        )
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a Hugging Face folder must have it") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error})") from error
    except RecursionError:
        raise ConfigError(f"{path}: {_deep_key(text)}: {_TOO_DEEP}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    if errors := list(_errors(values)):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in errors))
    return values


_TOO_DEEP = f"objects and lists are nested more than {DEEPEST} deep"


def _constant(text: str) -> _Invalid:
    return _Invalid(text, "is not a JSON number; use a finite one")


def _float(text: str) -> float | _Invalid:
    value = float(text)
    return value if isfinite(value) else _Invalid(_short(text), "too large for a float; use a finite number")


def _int(text: str) -> int | _Invalid:
    try:
        return int(text) if isfinite(float(text)) else _Invalid(_short(text), "too large; use a smaller number")
    except ValueError:  # more digits than Python converts
        return _Invalid(_short(text), "too large; use a smaller number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen:
                rule = "the key occurs twice in its object; keep one"
                values[name] = _Invalid(f"{_short(str(seen[name]))} and {_short(str(value))}", rule)
            seen[name] = value
    return values


def _errors(values: dict[str, Any]) -> Iterator[str]:
    """Yield an error for every invalid value, with its dotted key."""
    stack: list[tuple[str, Any, int]] = [("", values, 0)]
    while stack:
        where, value, depth = stack.pop()
        if isinstance(value, _Invalid):
            yield f"{where}={value.text}: {value.rule}"
        elif isinstance(value, str) and not _is_unicode(value):
            yield f"{where}: holds half of a character (a lone surrogate); use whole Unicode characters"
        elif isinstance(value, dict | list):
            if depth >= DEEPEST:
                yield f"{_short(where)}: {_TOO_DEEP}"
                continue
            items = value.items() if isinstance(value, dict) else enumerate(value)
            named = [(f"{where}.{name}".lstrip(".") if where else str(name), item) for name, item in items]
            if isinstance(value, dict) and not all(_is_unicode(name) for name in value):
                yield f"{where or 'the file'}: a key holds half of a character (a lone surrogate)"
                continue
            stack += [(name, item, depth + 1) for name, item in reversed(named)]


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _deep_key(text: str) -> str:
    """Return the top-level key under which the nesting becomes too deep."""
    depth, last = 0, ""
    for match in _TOKENS.finditer(text):
        token = match[0]
        if token[0] == '"':
            last = token[1:-1] if depth == 1 else last
        else:
            depth += 1 if token in "[{" else -1
        if depth > DEEPEST:
            break
    return last or "the file"


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:30]}…"
