"""Pairwise coverage: a small subset of rows that contains every pair of choices of two columns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Row = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def all_rows(choices: Mapping[str, Sequence[str]]) -> list[Row]:
    """The product of all choices."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def pairs_of(row: Row) -> set[Pair]:
    """Every pair of choices in a row."""
    return set(itertools.combinations(sorted(row.items()), 2))


def covering(rows: Sequence[Row]) -> list[Row]:
    """A greedy, deterministic selection of rows that contains every pair of the given rows."""
    pairs = [pairs_of(row) for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda at: len(pairs[at] & missing))
        chosen.append(rows[best])
        missing -= pairs[best]
    return chosen
