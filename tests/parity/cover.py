"""A pairwise cover: few rows of a table of choices in which every pair of choices of two columns still occurs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def all_rows(choices: Mapping[str, Sequence[str]]) -> list[Row]:
    """The whole product."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def pairs_of(row: Row) -> set[Pair]:
    """Every pair of choices that a row holds."""
    return set(itertools.combinations(sorted(row.items()), 2))


def covering(rows: Sequence[Row]) -> list[Row]:
    """Rows chosen greedily until every pair that occurs in any of them occurs; the same list each time."""
    held = [pairs_of(row) for row in rows]
    missing = set().union(*held)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda at: len(held[at] & missing))
        chosen.append(rows[best])
        missing -= held[best]
    return chosen
