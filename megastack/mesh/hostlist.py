"""Slurm host lists: ``rack[1-2]n[03-04],login`` names rack1n03, rack1n04, rack2n03, rack2n04 and login.

A list is a comma-separated sequence of terms. Each term is a name with any number of brackets, and a bracket holds
numbers and inclusive ranges. A number keeps the zero padding of the first number of its range. The last bracket varies
fastest, as in ``scontrol show hostnames``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from megastack.errors import MeshError

_TERM = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def hosts(text: str) -> Iterator[str]:
    """Iterate over the hosts of a list. The whole list is validated before the first host is returned.

    Raises:
        MeshError: the list is malformed.
    """
    terms = [_parts(term, text) for term in _terms(text)]
    return chain.from_iterable(_expand(parts) for parts in terms)


def first_host(text: str) -> str:
    """Return the first host of a list.

    Raises:
        MeshError: the list is malformed.
    """
    return next(hosts(text))


def _terms(text: str) -> list[str]:
    """The terms of a list: the text split at commas outside brackets."""
    found, end = list[str](), 0
    while match := _TERM.match(text, end):
        found.append(match.group())
        end = match.end()
        if end == len(text):
            return found
        if text[end] != ",":
            break
        end += 1
    raise MeshError(f"{text!r} is not a Slurm host list (malformed at character {end + 1})")


def _parts(term: str, text: str) -> list[str | list[tuple[str, str]]]:
    """The pieces of a term: plain text, and for each bracket its ranges."""
    found = list[str | list[tuple[str, str]]]()
    for piece in re.split(r"(\[[^\]]*\])", term):
        found.append([_range(item, text) for item in piece[1:-1].split(",")] if piece.startswith("[") else piece)
    return found


def _range(item: str, text: str) -> tuple[str, str]:
    match = _RANGE.fullmatch(item)
    first, last = match.groups() if match else ("", "")
    if match is None or int(last or first) < int(first):
        raise MeshError(f"{text!r} is not a Slurm host list ([{item}] is not a number or an ascending range)")
    return first, last or first


def _expand(parts: list[str | list[tuple[str, str]]]) -> Iterator[str]:
    """All hosts of a term; ranges are never materialized, so that the first host of a long range costs nothing."""
    if not parts:
        yield ""
        return
    head, *rest = parts
    for text in [head] if isinstance(head, str) else _numbers(head):
        for tail in _expand(rest):
            yield text + tail


def _numbers(ranges: list[tuple[str, str]]) -> Iterator[str]:
    for first, last in ranges:
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
